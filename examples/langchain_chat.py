"""Chat with a running server through LangChain.

pip install langchain-openai        # raydix itself does not need it
python examples/langchain_chat.py --url http://127.0.0.1:8000
"""

import argparse
import os

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI


def main() -> None:
    """Two turns; the second one's prompt begins with the first turn, which the server has in its cache."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--url", default="http://127.0.0.1:8000", help="the server")
    options.add_argument("--model", default="SmolLM2-135M-Instruct", help="the model's name")
    options.add_argument("--max-tokens", type=int, default=64)
    arguments = options.parse_args()

    chat = ChatOpenAI(
        base_url=f"{arguments.url}/v1",
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        model=arguments.model,
        temperature=0,
        max_tokens=arguments.max_tokens,
    )
    messages: list[BaseMessage] = [SystemMessage("You are a patient teacher of geography.")]
    for question in ("Name three rivers of Europe.", "Which of them is the longest?"):
        messages.append(HumanMessage(question))
        answer = chat.invoke(messages)
        messages.append(AIMessage(answer.content))
        print(f"{question}\n{answer.content}\n{answer.usage_metadata}\n")


if __name__ == "__main__":
    main()
