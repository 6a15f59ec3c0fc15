// Sets the colours before anything is drawn. A choice of the user goes before the system's.
try {
  const chosen = localStorage.getItem("draftree.theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch {
  // Storage may be switched off; then the system decides.
}
