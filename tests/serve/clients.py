"""`python tests/serve/clients.py --url URL --model NAME`: other people's Python clients, for real.

Runs in an environment of its own that has the clients, and needs nothing of ours: start the server
elsewhere. Each client chats, streams, and where it can, calls a tool over several turns, follows a
schema and embeds. Prints a row of docs/clients.md for each, with what failed.
"""

import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import version

QUESTION = "What is the weather in Paris? Use the tool."
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
TOOL = {"type": "function", "function": WEATHER}
HI = [{"role": "user", "content": "Say hi."}]
CITY = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "is_large": {"type": "boolean"}},
    "required": ["name", "is_large"],
    "additionalProperties": False,
}


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"Rain in {city}."


def try_openai(url, model):
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", timeout=120, max_retries=0)
    chat = client.chat.completions

    def stream():
        pieces = chat.create(model=model, messages=HI, max_tokens=16, stream=True)
        return "".join(piece.choices[0].delta.content or "" for piece in pieces)

    def tools():
        messages = [{"role": "user", "content": QUESTION}]
        first = chat.create(model=model, messages=messages, tools=[TOOL], tool_choice="required")
        message = first.choices[0].message
        messages.append(message)
        for call in message.tool_calls:
            result = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        last = chat.create(model=model, messages=messages, tools=[TOOL], tool_choice="none")
        return last.choices[0].message.content

    def prefill():
        begun = {"role": "assistant", "content": "Hello, my name"}
        reply = chat.create(model=model, messages=[*HI, begun], max_tokens=8)
        return reply.choices[0].message.content

    def schema():
        wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
        ask = [{"role": "user", "content": "Describe Paris."}]
        reply = chat.create(model=model, messages=ask, response_format=wanted)
        return str(json.loads(reply.choices[0].message.content)["is_large"])

    yield "models", lambda: client.models.list().data[0].id
    yield "chat", lambda: chat.create(model=model, messages=HI).choices[0].message.content
    yield "stream", stream
    yield "tools, two turns", tools
    yield "prefill", prefill
    yield "schema", schema
    yield "responses", lambda: client.responses.create(model=model, input="Say hi.").output_text
    yield (
        "embeddings",
        lambda: count(client.embeddings.create(model=model, input=["a", "b"]).data[1].embedding),
    )


def try_anthropic(url, model):
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="x")
    options = {"model": model, "max_tokens": 64}
    tool = {"name": WEATHER["name"], "input_schema": WEATHER["parameters"]}

    def stream():
        with client.messages.stream(messages=HI, **options) as events:
            return "".join(events.text_stream)

    def tools():
        messages = [{"role": "user", "content": QUESTION}]
        choice = {"type": "any"}
        reply = client.messages.create(
            messages=messages, tools=[tool], tool_choice=choice, **options
        )
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": get_weather(**use.input)}
            for use in reply.content
        ]
        messages += [
            {"role": "assistant", "content": reply.content},
            {"role": "user", "content": results},
        ]
        none = {"type": "none"}
        last = client.messages.create(messages=messages, tools=[tool], tool_choice=none, **options)
        return last.content[0].text

    def prefill():
        begun = {"role": "assistant", "content": "Hello, my name"}
        return client.messages.create(messages=[*HI, begun], **options).content[0].text

    yield "models", lambda: client.models.list().data[0].id
    yield "chat", lambda: client.messages.create(messages=HI, **options).content[0].text
    yield "stream", stream
    yield "tools, two turns", tools
    yield "prefill", prefill
    yield (
        "count",
        lambda: str(client.messages.count_tokens(model=model, messages=HI).input_tokens),
    )


def try_litellm(url, model):
    import litellm

    for kind, base in (("openai", f"{url}/v1"), ("anthropic", url), ("ollama_chat", url)):
        options = {"model": f"{kind}/{model}", "api_base": base, "api_key": "x"}

        def chat(options=options):
            return litellm.completion(messages=HI, **options).choices[0].message.content

        def tools(options=options, choice="required" if kind != "ollama_chat" else "auto"):
            messages = [{"role": "user", "content": QUESTION}]
            for turn in range(2):
                forced = {"tool_choice": choice} if turn == 0 else {}
                reply = litellm.completion(messages=messages, tools=[TOOL], **forced, **options)
                message = reply.choices[0].message
                messages.append(message.model_dump())
                for call in message.tool_calls or ():
                    result = get_weather(**json.loads(call.function.arguments))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            return message.content or str(message.tool_calls)

        yield f"{kind}: chat", chat
        yield f"{kind}: tools, two turns", tools


def try_langchain(url, model):
    from langchain.agents import create_agent
    from langchain_anthropic import ChatAnthropic
    from langchain_ollama import ChatOllama, OllamaEmbeddings
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    gpt = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="x")
    claude = ChatAnthropic(model=model, base_url=url, api_key="x")
    llama = ChatOllama(model=model, base_url=url)
    vectors = OpenAIEmbeddings(
        model=model, base_url=f"{url}/v1", api_key="x", check_embedding_ctx_length=False
    )

    def agent():
        found = create_agent(gpt, tools=[get_weather])
        messages = found.invoke({"messages": [("user", QUESTION)]}, {"recursion_limit": 6})
        return messages["messages"][-1].content

    yield "ChatOpenAI", lambda: gpt.invoke("Say hi.").content
    yield "ChatAnthropic", lambda: claude.invoke("Say hi.").content
    yield "ChatOllama, stream", lambda: "".join(piece.content for piece in llama.stream("Say hi."))
    yield "agent with a tool", agent
    yield "OpenAIEmbeddings", lambda: count(vectors.embed_documents(["a", "b"])[1])
    yield (
        "OllamaEmbeddings",
        lambda: count(OllamaEmbeddings(model=model, base_url=url).embed_query("a")),
    )


def try_pydantic_ai(url, model):
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class City(BaseModel):
        name: str
        is_large: bool

    chat = OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="x"))
    yield "chat", lambda: Agent(chat).run_sync("Say hi.").output
    yield "tool", lambda: Agent(chat, tools=[get_weather]).run_sync(QUESTION).output
    yield (
        "output type",
        lambda: str(Agent(chat, output_type=City).run_sync("Describe Paris.").output),
    )


def try_ollama(url, model):
    import ollama

    client = ollama.Client(host=url)
    options = {"num_predict": 32, "num_ctx": 4096}

    def tools():
        messages = [{"role": "user", "content": QUESTION}]
        reply = client.chat(model, messages, tools=[get_weather])
        messages.append(reply.message)
        for call in reply.message.tool_calls or ():
            result = get_weather(**call.function.arguments)
            messages.append({"role": "tool", "content": result, "tool_name": call.function.name})
        return client.chat(model, messages).message.content

    def schema():
        ask = [{"role": "user", "content": "Describe Paris."}]
        return str(json.loads(client.chat(model, ask, format=CITY).message.content)["is_large"])

    yield "list", lambda: client.list().models[0].model
    yield "show", lambda: ", ".join(client.show(model).capabilities)
    yield "ps", lambda: client.ps().models[0].model
    yield "chat", lambda: client.chat(model, HI, options=options).message.content
    yield "stream", lambda: "".join(p.message.content for p in client.chat(model, HI, stream=True))
    yield "generate", lambda: client.generate(model, "Say hi.", options=options).response
    yield "tools, two turns", tools
    yield "schema", schema
    yield "embed", lambda: count(client.embed(model, ["a", "b"]).embeddings[1])


def try_llm(url, model):
    """The command line, with a model of its own configuration."""
    folder = os.path.join(os.environ.get("TMPDIR", "/tmp"), "draftree-llm")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "extra-openai-models.yaml"), "w") as file:
        file.write(f"- model_id: here\n  model_name: {model}\n  api_base: {url}/v1\n")
        file.write("  supports_schema: true\n")
    llm = os.path.join(os.path.dirname(sys.executable), "llm")

    def run(*arguments):
        variables = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "x"}
        done = subprocess.run([llm, *arguments], env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    yield "prompt", lambda: run("-m", "here", "Say hi.")
    yield "schema", lambda: run("-m", "here", "--schema", "name str", "A dog.")
    yield "conversation", lambda: run("-m", "here", "-c", "Again.")


def count(vector):
    return f"{len(vector)} numbers"


CLIENTS = {
    "openai": try_openai,
    "anthropic": try_anthropic,
    "litellm": try_litellm,
    "langchain": try_langchain,
    "pydantic-ai-slim": try_pydantic_ai,
    "ollama": try_ollama,
    "llm": try_llm,
}


def try_client(name, url, model):
    """What was tried, and what of it failed."""
    tried, failed = [], []
    for what, call in CLIENTS[name](url, model):
        try:
            text = call()
            assert isinstance(text, str) and text.strip(), f"nothing came back: {text!r}"
            print(f"  {name} {what}: {' '.join(text.split())[:100]}", file=sys.stderr)
            tried.append(what)
        except Exception as error:
            print(f"  {name} {what} FAILED: {error}", file=sys.stderr)
            failed.append(f"{what}: {' '.join(str(error).split())[:200]}")
    return tried, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("clients", nargs="*", default=list(CLIENTS))
    options = parser.parse_args()
    for name in options.clients:
        tried, failed = try_client(name, options.url, options.model)
        print(f"| {name} {version(name)} | {', '.join(tried)} | {'; '.join(failed) or '—'} |")


if __name__ == "__main__":
    main()
