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

setup(
    name="multi_policy_async",
    version="0.1.0",
    description="Co-train several LLM policies fully asynchronously inside multi-agent workflows, on verl",
    long_description=(Path(__file__).parent / "README.md").read_text() if (Path(__file__).parent / "README.md").exists() else "",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    packages=find_namespace_packages(include=["recipe.multi_policy_async*"]),
    include_package_data=True,
    package_data={"recipe.multi_policy_async": ["config/**/*.yaml", "REQUIRED_VERL.txt", "README.md"]},
    install_requires=[],
    entry_points={"verl.plugins": ["multi_policy_async_cpu = recipe.multi_policy_async.backends.cpu.plugin"]},
)
