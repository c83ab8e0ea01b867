"""The generated pages of the documentation name everything that the code declares."""

import re

import pytest

from docs.generate import DOCUMENTS, ROOT, document_page, pages
from raydix.configs.pools import WorkersSection
from raydix.configs.schema import Config
from raydix.engine.api.requests import ChatCompletionRequest, CompletionRequest

MOST_COLUMNS = 4


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    return pages()


def names(page: str) -> set[str]:
    """Words in backticks."""
    return set(re.findall(r"`([^`]+)`", page))


def test_every_key_of_the_configuration_has_a_line(written: dict[str, str]) -> None:
    page = written["reference/configuration.md"]
    sections = Config.model_json_schema()["$defs"]
    keys = {key for name, definition in sections.items() if "Section" in name for key in definition["properties"]}
    assert keys - names(page) == {*WorkersSection.model_fields}
    pools = {f"workers.{pool}" for pool in WorkersSection.model_fields}
    assert pools | {*Config.model_fields} <= names(page)
    row = "| `block_size` | Token positions per KV block.<br>integer, ≥ 8, ≤ 128; default `16` | restarts everything |"
    assert row in page
    assert re.search(r"^\| `token_budget` .*\| applies in place \|$", page, re.M)


def test_what_looks_like_a_tag_is_seen(written: dict[str, str]) -> None:
    for page in ("configuration", "command-line"):
        assert "package:&lt;package>/&lt;file>" in written[f"reference/{page}.md"]
    rows = [row for page in written.values() for row in page.splitlines() if row.startswith("| ")]
    assert [row for row in rows if re.search(r"<(?!br>)\w+>", re.sub("`[^`]*`", "", row))] == []


def test_tables_are_narrow_enough_for_a_phone(written: dict[str, str]) -> None:
    """Of names and their meaning; what else there is to say of a key stands in one of these cells."""
    rows = [(uri, row) for uri, page in written.items() if uri.startswith("reference/") for row in page.splitlines()]
    assert [row for row in rows if len(re.findall(r"(?<!\\)\|", row[1])) > MOST_COLUMNS + 1] == []


def test_every_field_of_a_request_is_described_refused_or_ignored(written: dict[str, str]) -> None:
    fields = {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields}
    assert fields <= names(written["reference/http.md"])


def test_responses_have_their_objects(written: dict[str, str]) -> None:
    page = written["reference/http.md"]
    assert page.count("### ChatCompletion\n") == 1 and "### ErrorResponse" in page
    assert "| `choices` | list of object | `n` answers. |" in page
    assert "### ChatCompletionRequest" not in page
    assert "`ChatCompletion`, `Completion`, `EmbeddingList`" in page


def test_routes_have_a_sentence(written: dict[str, str]) -> None:
    routes = re.findall(r"^\| `(?:GET|POST) (\S+)` \| \w+ \| (.*) \|$", written["reference/http.md"], re.M)
    assert {"/v1/completions", "/v1/cache/events", "/health", "/docs"} <= {path for path, _ in routes}
    assert [path for path, sentence in routes if not sentence] == []


def test_every_module_has_a_sentence(written: dict[str, str]) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", written["reference/modules.md"], re.M)
    assert {"dispatch", "reading", "kv_cache_manager", "loader", "llm"} <= {module for module, _ in rows}
    assert [module for module, sentence in rows if not sentence.endswith((".", ":"))] == []
    assert re.search(r"^## `kernels/linear`\n\n.*\.$", written["reference/modules.md"], re.M)


def test_metrics_have_the_values_of_their_own_tags(written: dict[str, str]) -> None:
    page = written["reference/metrics.md"]
    assert "| `raydix_requests` | counter | `tenant`, `outcome` (`stop`, `length`, `aborted`, `failed`) |" in page
    assert "`outcome` (`computed`, `found`, `dropped`)" in page


def test_links_of_documents_lead_to_pages_of_the_site() -> None:
    page = document_page(ROOT / "README.md", "index.md")
    assert "](guides/serving.md)" in page
    assert "](architecture.md)" in page
    assert "](LICENSE)" not in page
    assert "](../architecture.md" in document_page(ROOT / "README.md", "guides/index.md")
    assert {*DOCUMENTS.values()} <= pages().keys()
