"""Lines are counted by folder, Python and CUDA together."""

import subprocess

from benchmarks.line import count_lines, count_lines_at, make_table


def write(root, name, num_lines):
    path = root / "draftree" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x\n" * num_lines)


def test_tables_have_a_row_for_each_folder_and_one_for_all(tmp_path):
    write(tmp_path, "core.py", 3)
    write(tmp_path, "kernels/cuda/a.py", 5)
    write(tmp_path, "kernels/cuda/source/a.cu", 7)
    write(tmp_path, "data/notes.md", 100)
    counts = count_lines(tmp_path)
    assert make_table(counts)[2:] == [
        "| . | 3 | 0 | 3 |",
        "| kernels | 5 | 7 | 12 |",
        "| all | 8 | 7 | 15 |",
    ]


def test_a_commit_is_counted_as_the_files_are(tmp_path):
    write(tmp_path, "kernels/a.cu", 7)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    assert count_lines_at(tmp_path, "HEAD") == count_lines(tmp_path)
    write(tmp_path, "kernels/a.cu", 2)
    before, now = count_lines_at(tmp_path, "HEAD"), count_lines(tmp_path)
    assert make_table(now, before)[-1] == "| all | 0 | 7 | 0 | 2 | 2 |"
