"""What a reply has beside its text: by chance, or as it was given from outside."""

from draftree.serve.identity import Identity


def test_each_is_its_own():
    found = [Identity.new() for _ in range(50)]
    assert len({one.token for one in found}) == len({one.seed for one in found}) == 50
    assert not any(one.is_repeatable for one in found)
    assert all(0 <= one.seed < 2**63 for one in found)
    assert Identity.new(is_repeatable=True).is_repeatable


def test_ids_of_one_reply_share_a_token_and_clients_cannot_choose_it(client):
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
    given = {"x-request-id": "mine", "draftree.identity": "mine"}
    found = [client.post("/v1/chat/completions", json=body, headers=given) for _ in range(2)]
    ids = [answer.headers["x-request-id"].removeprefix("req_") for answer in found]
    assert ids[0] != ids[1] and "mine" not in ids
    assert [answer.json()["id"] for answer in found] == [f"chatcmpl-{token}" for token in ids]


def test_items_of_a_response_have_ids_of_their_own(client, engine):
    from tests.serve import fake

    engine.pieces, engine.thinks = fake.THINKING_AND_CALLS, True
    answer = client.post("/v1/responses", json={"model": "fake", "input": "Hi"}).json()
    ids = [item["id"] for item in answer["output"]]
    assert len(ids) == 4 == len(set(ids)) and ids[0].startswith("rs_")


def test_seeds_differ_unless_they_are_given(client, engine):
    body = {"model": "fake", "prompt": "Hi"}
    for more in ({}, {}, {"seed": 7}):
        client.post("/v1/completions", json={**body, **more})
    seeds = [call["sampling"].seed for call in engine.calls]
    assert len(set(seeds)) == 3 and seeds[-1] == 7
