"""Two tenants of one server: each finds its own prompt in the cache, and not the other's.

    python examples/tenants.py --url http://127.0.0.1:8000 --keys rdx-... rdx-...

The server needs `tenants` in its configuration; `raydix key` makes keys.
"""

import argparse
import uuid

from openai import OpenAI


def main() -> None:
    """Ask the same as one tenant, as the same again, and as the other."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--url", default="http://127.0.0.1:8000", help="the server")
    options.add_argument("--keys", nargs=2, required=True, metavar="KEY", help="API keys of two tenants")
    arguments = options.parse_args()
    first, second = arguments.keys

    prompt = f"Minutes of meeting {uuid.uuid4()}: " + "The budget was discussed at length. " * 20
    for name, key in (("first", first), ("first again", first), ("second", second)):
        cached, total = cached_tokens(arguments.url, key, prompt)
        print(f"{name}: {cached} of {total} prompt tokens cached")


def cached_tokens(url: str, api_key: str, prompt: str) -> tuple[int, int]:
    """Tokens of the prompt that a tenant's request finds in the cache, and all of them."""
    with OpenAI(base_url=f"{url}/v1", api_key=api_key) as client:
        [model] = client.models.list().data
        usage = client.completions.create(model=model.id, prompt=prompt, max_tokens=1).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0, usage.prompt_tokens


if __name__ == "__main__":
    main()
