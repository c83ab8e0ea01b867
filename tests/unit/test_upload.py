"""Forms, whole and byte by byte."""

import pytest

from raydix.actors.ingress.upload import MAX_FIELD_BYTES, MAX_NAME, MAX_PARTS, Form
from raydix.engine.core.errors import MediaTypeError, RequestError

BOUNDARY = "----bound"
TYPE = f"multipart/form-data; boundary={BOUNDARY}"


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    given = "" if filename is None else f'; filename="{filename}"'
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{given}\r\nContent-Type: text/plain\r\n\r\n'
    return head.encode() + content + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()
CONTENT = b'{"a": 1}\r\n--' + BOUNDARY[:4].encode() + b"\n\0\xff"
"""With bytes that look like the beginning of a boundary."""
BODY = part("purpose", b"batch") + part("file", CONTENT, "in.jsonl") + part("expires_after[seconds]", b"3600") + END


def fed(body: bytes, size: int) -> tuple[Form, bytes]:
    form = Form(TYPE)
    return form, b"".join(form.feed(body[start : start + size]) for start in range(0, len(body), size))


@pytest.mark.parametrize("size", [1, 2, 7, 64, len(BODY)])
def test_a_form_is_read_in_pieces_of_any_size(size: int) -> None:
    form, content = fed(BODY, size)
    assert content == CONTENT
    assert form.fields() == {"purpose": "batch", "expires_after[seconds]": "3600"}
    assert form.filename == "in.jsonl"


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (BODY[:-5], "ends before the end"),
        (part("purpose", b"batch") + END, "Missing required parameter: 'file'"),
        (part("file", b"", "a") + part("file", b"", "b") + END, "'file' is given twice"),
        (part("purpose", b"a") + part("purpose", b"b") + END, "'purpose' is given twice"),
        (part("purpose", b"x" * (MAX_FIELD_BYTES + 1)) + END, "'purpose' must have at most"),
        (b"".join(part(str(number), b"") for number in range(MAX_PARTS + 1)) + END, "at most 16 parts"),
        (part("file", b"", "a") + part("purpose", b"\xff") + END, "not valid UTF-8"),
        (b"no form at all", "not a valid form"),
    ],
    ids=range(8),
)
def test_forms_that_are_refused(body: bytes, message: str, size: int) -> None:
    with pytest.raises(RequestError, match=message):
        fed(body, size)[0].fields()


@pytest.mark.parametrize("content_type", [None, "", "application/json", "multipart/form-data"])
def test_content_types_that_are_refused(content_type: str | None) -> None:
    with pytest.raises(MediaTypeError):
        Form(content_type)


def test_a_boundary_that_is_too_long_is_refused() -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        Form(f"multipart/form-data; boundary={'x' * 1000}")


def test_names_of_files_are_names_alone() -> None:
    form, _ = fed(part("file", b"", f"../../etc/{'x' * 300}") + END, 1000)
    assert form.filename == "x" * MAX_NAME
    assert fed(part("file", b"") + END, 1000)[0].filename == "file"
