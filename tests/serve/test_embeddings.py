"""Embeddings over HTTP: one job a request, in the order of the texts, without harm to replies."""

import base64
import json
import socket

import httpx2
import numpy as np
import pytest

from tests.serve.conftest import wait_for
from tests.serve.test_openai import error_of


def embed(client, **fields):
    return client.post("/v1/embeddings", json={"model": "fake", **fields})


@pytest.mark.parametrize(
    ("texts", "lengths"),
    [("abc", [3]), (["a", "abc"], [1, 3]), ([5, 6], [2]), ([[5], [6, 7, 8]], [1, 3])],
)
def test_a_vector_a_text(client, engine, texts, lengths):
    reply = embed(client, input=texts).json()
    assert [item["embedding"] for item in reply["data"]] == [[n, 0, 0, 1] for n in lengths]
    assert [item["index"] for item in reply["data"]] == list(range(len(lengths)))
    assert reply["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}
    assert (reply["object"], reply["model"]) == ("list", "fake")


def test_base64_is_float32(client):
    (item,) = embed(client, input="abc", encoding_format="base64").json()["data"]
    vector = np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4")
    assert vector.tolist() == [3, 0, 0, 1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": "a" * 9}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 2}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({}, "input"),
    ],
)
def test_what_is_refused_is_named(client, engine, fields, param):
    assert param in error_of(embed(client, **fields), 400)["param"]
    assert engine.calls == []


def test_a_client_that_leaves_ends_its_request(start, engine):
    """After the text that is being read."""
    running = start()
    seen = []

    def leave(ids):
        seen.append(ids)
        connection.close()
        wait_for(lambda: running.service.thread.turns.jobs[0].is_cancelled)
        return np.zeros(4, dtype=np.float32)

    engine.embed = leave
    body = json.dumps({"input": ["a", "b", "c"]})
    head = "POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", running.port))
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    wait_for(lambda: seen and running.service.queue.num_admitted == 0)
    del engine.embed
    assert len(seen) == 1


def test_real_vectors(brief):
    with httpx2.Client(base_url=brief.url, timeout=120) as client:
        first = embed(client, input=["one", "two"]).json()
        again = embed(client, input=["three", "two"]).json()
        assert first["data"][1]["embedding"] == again["data"][1]["embedding"]
        vector = np.array(first["data"][0]["embedding"])
        assert abs(np.linalg.norm(vector) - 1) < 1e-5
        error = error_of(embed(client, input="x " * 600), 400)
        assert error["code"] == "context_length_exceeded"
        error = error_of(embed(client, input=[10**8]), 400)
        assert "vocabulary" in error["message"]
