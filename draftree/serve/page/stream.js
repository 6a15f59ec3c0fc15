// Requests to the server: JSON in one piece, and replies as a stream of events.

export class ApiError extends Error {
  constructor(message, status = 0, retryAfter = null, code = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
    this.code = code; // as the API names what is wrong
  }
}

/** An object of the server. key: an API key, or "". */
export async function getJson(path, key) {
  const response = await send(path, { headers: headersFor(key) });
  return response.json();
}

/** The events of a reply, as objects; ends when the reply does. How far a reply is that has not
 * begun comes as {comment, choices: []}. */
export async function* ask(body, key, signal) {
  const response = await send("v1/chat/completions", {
    method: "POST",
    headers: { ...headersFor(key), "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  let isDone = false;
  for await (const { data, comment } of readEvents(response.body)) {
    if (comment) yield { comment, choices: [] };
    if (!data) continue;
    isDone = data === "[DONE]";
    if (isDone) break;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message, 500, null, event.error.code);
    yield event;
  }
  if (!isDone) throw new ApiError("The server ended the reply in the middle.");
}

async function send(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (!response.ok) throw await explain(response);
  return response;
}

async function explain(response) {
  const retryAfter = Number(response.headers.get("Retry-After")) || null;
  try {
    const { error } = await response.json();
    return new ApiError(error.message, response.status, retryAfter, error.code);
  } catch {
    return new ApiError(`The server answered ${response.status}.`, response.status, retryAfter);
  }
}

async function* readEvents(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const fieldsOf = (name) =>
          part
            .split("\n")
            .filter((line) => line.startsWith(name))
            .map((line) => line.slice(name.length).trimStart())
            .join("\n");
        yield { data: fieldsOf("data:"), comment: fieldsOf(":") };
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection to the server was lost.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

const headersFor = (key) => key ? { Authorization: `Bearer ${key}` } : {};
