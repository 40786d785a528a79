"""Runs the notebook cleanrl_graph/docs/first_run.ipynb without Jupyter.

    python tests/run_notebook.py --write

It executes the code cells in a new folder, prints what they print and, with --write, puts this and
their figures into the notebook. Paths of this machine become those of a clone in the home folder.
"""

import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "cleanrl_graph" / "docs" / "first_run.ipynb"


def code_cells(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def execute(sources: list[str], names: dict) -> Iterator[tuple[str, list[bytes]]]:
    """What each piece of code prints, and its figures as PNGs. They share the global `names`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.close("all")  # of whoever had some open
    for i, source in enumerate(sources):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(source, f"cell {i}", "exec"), names)
        pictures = []
        for number in plt.get_fignums():
            picture = io.BytesIO()
            plt.figure(number).savefig(picture, dpi=60)
            pictures.append(picture.getvalue())
        plt.close("all")
        yield out.getvalue(), pictures


def outputs_of(text: str, pictures: list[bytes]) -> list[dict]:
    """As a notebook has them."""
    outputs = []
    if text:
        lines = text.splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    for picture in pictures:
        data = {"image/png": base64.b64encode(picture).decode()}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    return outputs


def main(write: bool) -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    cells = code_cells(notebook)
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        folder = os.path.realpath(folder)
        os.chdir(folder)
        found = execute(["".join(cell["source"]) for cell in cells], {"__name__": "__main__"})
        for i, (text, pictures) in enumerate(found, 1):
            text = text.replace(folder, "/home/me").replace(str(ROOT), "/home/me/cleanrl_graph")
            print(text, end="", flush=True)
            cells[i - 1].update(execution_count=i, outputs=outputs_of(text, pictures))
        os.chdir(ROOT)
    if write:
        NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main("--write" in sys.argv)
