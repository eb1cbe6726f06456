"""Converting with Megatron-Bridge (``megatron.bridge``), for model families that it knows and this package does not.

It builds the whole model in memory. This has not run with the real package, only with a stand-in of the same
signatures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_dcp.checkpoint.destination import check_apart, check_new, new_directory
from megatron_dcp.checkpoint.files import WritableFormat, detect_format

_INSTALL = "pip install megatron-bridge"


def convert_via_bridge(src: str | Path, dst: str | Path, *, to: WritableFormat, hf_model: str | None = None) -> Path:
    """Let Megatron-Bridge write the checkpoint ``src`` as ``dst``, which appears only when it is complete.

    Args:
        src: A Hugging Face directory for ``to="torch_dist"``, a ``torch_dist`` checkpoint for ``to="hf"``.
        dst: A name that does not exist yet.
        hf_model: For ``to="hf"``: name or directory of the Hugging Face model that ``src`` comes from, which says what
            Megatron-Bridge has to write.

    Returns:
        ``dst`` as a path. A ``torch_dist`` checkpoint of Megatron-Bridge says its shape in a ``run_config.yaml``, which
        is for Megatron-Bridge to read.

    Raises:
        ValueError: Megatron-Bridge is not installed, does not convert in this direction, or has raised an error;
            ``dst`` exists.
    """
    dst, stored = Path(dst), detect_format(src)
    if (stored, to) not in (("hf", "torch_dist"), ("torch_dist", "hf")):
        raise ValueError(
            f"Megatron-Bridge converts hf to torch_dist and torch_dist to hf, not {stored} to {to}; leave out "
            "--via bridge"
        )
    if to == "hf" and hf_model is None:
        raise ValueError(
            "Megatron-Bridge writes hf after a model that exists: give the name or directory of the one that "
            f"{str(src)!r} comes from with --hf-model"
        )
    if to != "hf" and hf_model is not None:
        raise ValueError("--hf-model is for --to hf; leave it out")
    check_new(dst)
    check_apart(src, dst)
    bridge = _auto_bridge()
    with new_directory(dst) as directory:
        try:
            if to == "hf":
                bridge.from_hf_pretrained(hf_model).export_ckpt(str(src), str(directory))
            else:
                bridge.import_ckpt(str(src), str(directory))
        except Exception as error:  # whatever its many parts raise
            raise ValueError(
                f"Megatron-Bridge could not convert {str(src)!r}: {type(error).__name__}: {error}"
            ) from error
    return dst


def _auto_bridge() -> Any:
    try:
        from megatron.bridge import AutoBridge
    except ImportError as error:
        raise ValueError(f"--via bridge needs Megatron-Bridge, which is not there ({error}): {_INSTALL}") from error
    return AutoBridge
