"""The README says what the code says."""

from __future__ import annotations

from pathlib import Path

from hpcli.config.export import yaml_reference

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- reference: begin -->", "<!-- reference: end -->"


def write_reference() -> None:
    """Put the generated YAML reference into the README (``make reference``)."""
    before, rest = README.read_text().split(BEGIN)
    after = rest.split(END)[1]
    README.write_text(f"{before}{BEGIN}\n\n{yaml_reference()}\n{END}{after}")


def test_yaml_reference_in_the_readme_is_the_generated_one() -> None:
    text = README.read_text().split(BEGIN)[1].split(END)[0]
    assert text.strip() == yaml_reference().strip(), "run `make reference`"


if __name__ == "__main__":
    write_reference()
