import pytest

from doc_examples import DOCUMENTS, Example, examples, run

EXAMPLES = [example for document in DOCUMENTS for example in examples(document)]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example.document.name}: {example.command}")
def test_a_documented_command_prints_what_the_document_shows(example: Example) -> None:
    output = run(example.command)
    assert example.matches(output), f"{example.document} shows\n{example.printed}\nbut it prints\n{output}"


def test_the_readme_has_examples() -> None:
    assert any(example.document.name == "README.md" for example in EXAMPLES)
