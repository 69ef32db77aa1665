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
"""The template check tells what the gateway will do with a conversation."""

from ..check_template import main
from .fakes.tiny_model_folder import CHATML, make_model_folder


def findings(folder, *arguments):
    lines: list[str] = []
    code = main(["--model", str(folder), *arguments], show=lines.append)
    return code, "\n".join(lines)


def test_a_plain_chatml_template_is_append_only_everywhere(tmp_path):
    code, text = findings(make_model_folder(tmp_path / "model"))
    assert code == 0 and "NEW ROW" not in text and text.count("append-only") == 7


def test_a_template_that_strips_thinking_is_told_with_what_it_changes(tmp_path):
    content = "(message.content.split('</think>')[-1] if message.role == 'assistant' else message.content)"
    code, text = findings(
        make_model_folder(tmp_path / "model", template=CHATML.replace("(message.content or '')", content))
    )
    assert code == 0 and text.count("NEW ROW") == 2
    assert "NEW ROW      an answer with thinking" in text and "sampled '<think>" in text


def test_a_template_that_trims_every_answer_makes_each_turn_its_own_row(tmp_path):
    template = CHATML.replace("(message.content or '')", "message.content | upper")
    code, text = findings(make_model_folder(tmp_path / "model", template=template))
    assert code == 1 and "every turn becomes a row of its own" in text


def test_a_folder_without_a_model_is_told_in_one_line(tmp_path):
    code, text = findings(tmp_path / "absent")
    assert code == 2 and "does not exist" in text and "\n" not in text
