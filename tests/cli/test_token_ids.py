"""Token ids of rows and ids that end an answer: one outside the vocabulary is one line that names its place."""

from __future__ import annotations

import json

import pytest

from archon.data.mapping import encoded_rows
from archon.data.sources import SourceRow
from archon.schema.errors import DatasetError

KEYS = ["train_data.prompt_key=prompt", "train_data.response_key=response"]
VOCABULARY = 16


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        ("1.5", "'input_ids' is [1, 1.5, 2]; expected a list of whole numbers"),
        ("true", "'input_ids' is [1, True, 2]; expected a list of whole numbers"),
        ('"3"', "'input_ids' is [1, '3', 2]; expected a list of whole numbers"),
        ("null", "'input_ids' is [1, None, 2]; expected a list of whole numbers"),
        ("1" + "0" * 30, "'input_ids' has the token id of more than 64 bits, outside the model's vocabulary of 16"),
        ("-1", "'input_ids' has the token id -1, outside the model's vocabulary of 16"),
        (str(VOCABULARY), "'input_ids' has the token id 16, outside the model's vocabulary of 16"),
    ],
)
def test_an_id_that_is_none_of_the_models_is_named_by_its_row(archon, sft_overrides, dataset, caplog, token, reason):
    good = '{"input_ids": [1, 2, 3], "loss_mask": [0, true, 1]}'  # a mask may hold truth values
    dataset.write_text(f'{good}\n{{"input_ids": [1, {token}, 2], "loss_mask": [0, 1, 1]}}\n{good}\n')
    overrides = [override for override in sft_overrides if override not in KEYS]
    outcome = archon("sft", *overrides)
    assert outcome.code == 2 and f"archon: {dataset}:2: {reason}" in outcome.err.splitlines()[-1]
    skipped = archon("sft", *overrides, "train_data.bad_rows=skip")
    assert skipped.code == 0 and f"skipped 1 of 3 rows that cannot be used: 1: {reason}" in caplog.text


def test_ids_without_a_known_vocabulary_fit_their_storage():
    def rows(token):
        return encoded_rows([SourceRow("rows:1", {"input_ids": [1, token], "loss_mask": [0, 1]})])

    assert rows(2**31 - 1) == [{"input_ids": [1, 2**31 - 1], "loss_mask": [0, 1]}]
    with pytest.raises(DatasetError, match=r"rows:1: 'input_ids' has the token id 2147483648, outside 0 to 2\^31 - 1"):
        rows(2**31)


@pytest.mark.parametrize("command", ["generate", "sft"])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json", "tokenizer.json"])
def test_an_end_id_outside_the_vocabulary_is_refused(archon, checkpoint, sft_overrides, command, file):
    wrong = VOCABULARY
    (checkpoint / "generation_config.json").unlink()
    path = checkpoint / file
    if file == "tokenizer.json":  # the end token alone gets a larger id
        content = json.loads(path.read_text())
        end = json.loads((checkpoint / "tokenizer_config.json").read_text())["eos_token"]
        for token in content["added_tokens"]:
            if token["content"] == end:
                wrong = token["id"]
        vocabulary = json.loads((checkpoint / "config.json").read_text())
        (checkpoint / "config.json").write_text(json.dumps(vocabulary | {"vocab_size": wrong, "eos_token_id": 0}))
    else:
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(content | {"eos_token_id": [0, wrong]}))
    arguments = [checkpoint, "--prompt", "1+1="] if command == "generate" else sft_overrides
    complaint = archon(command, *arguments).complaint
    assert f"the id {wrong}, which ends an answer, is outside the model's vocabulary of {wrong}" in complaint
    assert str(checkpoint) in complaint
