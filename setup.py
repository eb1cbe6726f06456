from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="megatron-dcp",
    version="0.1.0",
    description="Long-context inference on Megatron-Core models with a KV cache sharded along the sequence",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_dcp", "megatron_dcp.*"]),
    package_data={"megatron_dcp": ["py.typed", "profiling/page.html"]},
    install_requires=[
        "megatron-core>=0.16.1,<0.20",
        "torch>=2.6",
        "numpy",
        "packaging>=24.2",
        # Megatron-Core imports these two without declaring them.
        "einops>=0.8",
        "psutil",
        "safetensors>=0.4",
        "tqdm>=4.66",
        "tokenizers>=0.20",
        "transformers>=4.57",
    ],
    extras_require={
        "te": ["transformer-engine[pytorch]>=2.15"],
        "flash": ["flash-attn>=2.8"],
        "flashinfer": ["flashinfer-python>=0.7.4"],
        "serve": ["fastapi>=0.115", "prometheus_client>=0.20", "uvicorn>=0.30"],
        "plot": ["matplotlib>=3.9"],
        "test": [
            "hypothesis>=6.100",
            "matplotlib>=3.9",
            "mypy>=1.15",
            "prometheus_client>=0.20",
            "pytest>=8.3",
            "ruff>=0.12",
            # torch for GPUs brings it, torch for CPUs does not: the kernels are interpreted and compiled without a GPU.
            "triton>=3.4; platform_system == 'Linux' and platform_machine in 'x86_64 aarch64'",
        ],
    },
    entry_points={"console_scripts": ["megatron-dcp = megatron_dcp.cli:main"]},
    classifiers=[
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
    ],
)
