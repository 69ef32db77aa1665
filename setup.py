# Copyright 2026 the multi_policy_async authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
from pathlib import Path

from setuptools import find_namespace_packages, setup

README = Path(__file__).parent / "README.md"

# Every process of a job needs these; none of them imports torch.
BASE = [
    "verl==0.9.1",
    "cachetools",  # verl 0.9.1 imports it without asking for it
    "aiohttp",
    "fastapi",
    "filelock",
    "httptools",
    "httpx",
    "httpx-aiohttp==0.2.0",  # httpx over aiohttp: a third of the CPU time per call with many connections
    "hydra-core>=1.3.2,<1.4",
    "jinja2",
    "numpy",
    "omegaconf>=2.3,<2.4",
    "openai",
    "orjson",
    "pillow",
    "pandas",
    "prometheus-client",
    "psutil",
    "pyarrow",
    "pydantic>=2.7,<3",
    "pyyaml",
    "sglang-router==0.3.2",
    "tokenizers",
    "uvicorn",
]

# The set that the CPU tests run with.
CPU = [
    "torch==2.13.0",
    "transformers==5.10.4",
    "tensordict==0.10.0",
    "ray[default]==2.60.0",
    "reasoning-gym==0.1.25",
    "gguf==0.19.0",
    "llguidance==1.9.1",
]

# sglang 0.5.12 pins a transformers that verl 0.9.1 excludes: install with scripts/gpu_overrides.txt (docs/gpu.md).
GPU = [
    "torch==2.11.0",
    "torchvision==0.26.0",
    "transformers==5.9.0",
    "sglang==0.5.12",
    "cupy-cuda13x==14.0.1",
    "pyzmq",
    "reasoning-gym==0.1.25",
]

# sglang-router's successor, for gateway.router=smg.
SMG = ["smg==1.13.0"]

# What examples/multi_policy/agents are written with; each as an extra of its own.
FRAMEWORKS = {
    "anthropic": ["anthropic==2.14.0"],
    "autogen": ["ag2[openai]==1.2.1"],  # AutoGen's maintained successor; autogen-agentchat pins an older protobuf
    "langgraph": ["langgraph==1.2.24", "langchain-openai==1.7.4"],
    "openai-agents": ["openai-agents==0.24.0"],
}
ALL_FRAMEWORKS = [package for packages in FRAMEWORKS.values() for package in packages]

DEV = [
    *ALL_FRAMEWORKS,
    *SMG,
    "hypothesis==6.170.17",
    "matplotlib",
    "pytest==9.2.0",
    "pytest-xdist==3.8.0",
    "ruff==0.14.10",
    "schemathesis==4.32.5",
]

setup(
    name="multi_policy_async",
    version="0.1.0",
    description="Co-train several LLM policies fully asynchronously inside multi-agent workflows, on verl",
    long_description=README.read_text() if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_namespace_packages(include=["recipe.multi_policy_async*"]),
    include_package_data=True,
    package_data={
        "recipe.multi_policy_async": ["config/**/*.yaml", "config/*.yaml", "REQUIRED_VERL.txt", "README.md"],
        "recipe.multi_policy_async.simulator": ["config/*.yaml"],
    },
    install_requires=BASE,
    extras_require={"cpu": CPU, "gpu": GPU, "smg": SMG, "dev": DEV, **FRAMEWORKS, "frameworks": ALL_FRAMEWORKS},
    entry_points={"verl.plugins": ["multi_policy_async_cpu = recipe.multi_policy_async.backends.cpu.plugin"]},
)
