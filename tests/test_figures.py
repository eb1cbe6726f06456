from __future__ import annotations

import pytest

from megatron_dcp import figures


def test_what_cannot_be_plotted_is_said_before(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"'a.txt' names no format for a plot; use a name that ends in .png"):
        figures.check_plot("a.txt")
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'megatron-dcp\[plot\]'"):
        figures.check_plot("a.png")
    monkeypatch.setattr(figures, "find_spec", lambda name: name)
    with pytest.raises(ValueError, match="is no directory; make it first"):
        figures.check_plot(str(tmp_path / "none" / "a.png"))
