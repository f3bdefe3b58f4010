"""Mistakes in data, supervised training and the run loop."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SFT, PREFERENCE = "tests/rl/test_sft.py", "tests/rl/test_preference.py"
SFT_ADAPTERS, LORA_RESUME = "tests/rl/test_sft_adapters.py", "tests/lora/test_resume.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "the token that follows an answer is trained",
        "archon/data/encoding.py",
        'return end + len(stop), ""',
        'return end + len(stop) + 1, ""',
        ("tests/data/test_chat_template.py",),
    ),
    Mutant(
        "a message with weight 0 is trained",
        "archon/data/encoding.py",
        'if message["role"] != "assistant" or not trained[index]:',
        'if message["role"] != "assistant":',
        ("tests/data/test_chat_template.py",),
    ),
    Mutant(
        "an assistant turn without a prompt is trained",
        "archon/data/encoding.py",
        "is_trained and index > 0 for",
        "is_trained for",
        ("tests/data/test_formats.py",),
    ),
    Mutant(
        "a turn whose thinking the template removed is trained",
        "archon/data/encoding.py",
        'complete or options.stripped_thinking == "train"',
        "True",
        ("tests/data/test_encoding.py",),
    ),
    Mutant(
        "a field that the template drops is lost without a word",
        "archon/data/encoding.py",
        "if lost is not None and lost not in ignore_fields:",
        "if lost is not None and lost not in ignore_fields and False:",
        ("tests/data/test_encoding.py",),
    ),
    Mutant(
        "the end of a turn is doubled in multi-turn RL",
        "archon/data/encoding.py",
        "if stopped and (token := chat.special_suffix(closing)):",
        "if not stopped and (token := chat.special_suffix(closing)):",
        ("tests/data/test_chat_template.py",),
    ),
    Mutant(
        "generation does not stop at the ids of the generation config",
        "archon/checkpoint/chat_template.py",
        '*getattr(tokenizer, "checkpoint_stop_ids", ())',
        '*getattr(tokenizer, "no_stop_ids", ())',
        ("tests/checkpoint/test_tokenizer.py",),
    ),
    Mutant(
        "generation does not stop at the end of turn of the chat template",
        "archon/checkpoint/chat_template.py",
        "ids += tokenizer.convert_tokens_to_ids(ends)",
        "ids += tokenizer.convert_tokens_to_ids(ends[:0])",
        ("tests/checkpoint/test_tokenizer.py",),
    ),
    Mutant(
        "an export does not name the stop tokens",
        "archon/checkpoint/tokenizer.py",
        "if set(ids) != set(configured):",
        "if not ids:",
        ("tests/checkpoint/test_tokenizer.py",),
    ),
    Mutant(
        "the nulls of Arrow rows are kept",
        "archon/data/sources.py",
        "for key, item in value.items() if item is not None}",
        "for key, item in value.items()}",
        ("tests/data/test_sources.py",),
    ),
    Mutant(
        "the cache of rows ignores the options",
        "archon/data/registry.py",
        "cached_rows(files, [kind, *recipe, tokenizer_identity(tokenizer)], prepare)",
        "cached_rows(files, [kind, tokenizer_identity(tokenizer)], prepare)",
        ("tests/data/test_token_rows.py",),
    ),
    Mutant(
        "every answer of a conversation is preferred, not the last alone",
        "archon/data/pairs.py",
        'turns=replace(turns or TurnOptions(), train_turns="last"),',
        "turns=turns or TurnOptions(),",
        ("tests/data/test_pairs.py",),
    ),
    Mutant(
        "rows come in the same order in every epoch",
        "archon/data/loader.py",
        'random.Random(f"rows {self.seed} {epoch}")',
        'random.Random(f"rows {self.seed} 0")',
        ("tests/data/test_loader.py",),
    ),
    Mutant(
        "the preference of an answer is not taken less the reference's",
        "archon/training/preference.py",
        "values = values - (self._scores(self.reference, batch) * mask).sum(1)",
        "self._scores(self.reference, batch)",
        ("tests/rl/test_preference.py",),
    ),
    Mutant(
        "a held-out loss is the mean of the batches' means",
        "archon/training/sft.py",
        'weight = measured.pop("loss_weight")\n',
        'measured.pop("loss_weight")\n            weight = 1.0\n',
        ("tests/rl/test_sft.py::test_evaluation_loss_is_per_token_whatever_the_batch_size",),
    ),
    Mutant(
        "a stand-in for a missing document is trained on",
        "archon/training/batch_sharding.py",
        '    placeholder["loss_mask"].zero_()\n',
        "",
        ("tests/rl/test_sharding.py",),
    ),
    Mutant(
        "a reward model scores the token before an answer's last one",
        "archon/training/preference.py",
        "answers = [([*ids, ids[-1]], [*[0] * len(ids), 1]) for ids, _ in answers]",
        "answers = [(ids, [*[0] * (len(ids) - 1), 1]) for ids, _ in answers]",
        (f"{PREFERENCE}::test_reward_model_scores_the_last_token_of_each_answer",),
    ),
    Mutant(
        "a reward model's score is that of a repeated answer",
        "archon/training/preference.py",
        "[([*ids, ids[-1]], [*[0] * len(ids), 1]) for ids, _ in answers]",
        "[([*ids, ids[-1], ids[-1]], [*[0] * len(ids), 0, 1]) for ids, _ in answers]",
        (f"{PREFERENCE}::test_reward_model_scores_the_last_token_of_each_answer",),
    ),
    Mutant(
        "an error inside an update saves half-updated weights",
        "archon/training/loop.py",
        "if self._saved_step == self.step or self._mid_update:",
        "if self._saved_step == self.step:",
        (f"{SFT}::test_error_inside_an_update_saves_no_checkpoint",),
    ),
    Mutant(
        "an SFT step does not say that it is inside an update",
        "archon/training/sft.py",
        "        self._mid_update = True\n",
        "",
        (f"{SFT}::test_error_inside_an_update_saves_no_checkpoint",),
    ),
    Mutant(
        "a step on pairs does not say that it is inside an update",
        "archon/training/preference.py",
        "        self._mid_update = True\n",
        "",
        (f"{PREFERENCE}::test_error_inside_an_update_saves_no_checkpoint",),
    ),
    Mutant(
        "an RL step says that it is inside an update only after it",
        "rl/trainer.py",
        """                self._mid_update = True
                with timed(seconds, "update"):
                    metrics |= self._compute(lambda: self.update.train(prepared, self.step))
""",
        """                with timed(seconds, "update"):
                    metrics |= self._compute(lambda: self.update.train(prepared, self.step))
                self._mid_update = True
""",
        ("tests/rl/test_trainer.py::test_error_of_an_optimizer_saves_no_checkpoint",),
    ),
    Mutant(
        "after its first step a run never saves again",
        "archon/training/loop.py",
        "                    self._mid_update = False\n",
        "",
        (f"{SFT}::test_error_between_steps_saves_the_last_complete_step",),
    ),
    Mutant(
        "an error loses the steps since the last checkpoint",
        "archon/training/loop.py",
        "if kind in (None, StoppedError) or ControlPlane.world().size == 1:",
        "if kind in (None, StoppedError):",
        (f"{SFT}::test_error_between_steps_saves_the_last_complete_step",),
    ),
    Mutant(
        "a resumed run begins with a fresh LoRA",
        "archon/engine/engine_io.py",
        """        load_model_state(self.model, state["model"], self._known_names())
        if self.optimizer""",
        """        if not self.lora:
            load_model_state(self.model, state["model"], self._known_names())
        if self.optimizer""",
        (f"{LORA_RESUME}::test_resumed_training_is_bitwise_the_uninterrupted_one",),
    ),
    Mutant(
        "resumed RL generates with a fresh LoRA",
        "archon/engine/engine_io.py",
        """        load_model_state(self.model, state["model"], self._known_names())
        if self.optimizer""",
        """        if not any(map(is_lora, state["model"])):
            load_model_state(self.model, state["model"], self._known_names())
        if self.optimizer""",
        (f"{LORA_RESUME}::test_resumed_rl_generates_with_its_trained_lora",),
    ),
    Mutant(
        "a resumed run of multi-LoRA begins with fresh LoRAs",
        "archon/engine/engine_io.py",
        """        load_model_state(self.model, state["model"], self._known_names())
        if self.optimizer""",
        """        if not self.loras:
            load_model_state(self.model, state["model"], self._known_names())
        if self.optimizer""",
        (f"{SFT_ADAPTERS}::test_a_run_of_several_adapters_resumes_bitwise",),
    ),
    Mutant(
        "a resumed run of multi-LoRA begins with fresh optimizers",
        "archon/engine/engine_io.py",
        '            lora.load_state_dict(self.model, state["adapters"][name], self._known_names())\n',
        '            lora.steps = int(state["adapters"][name]["steps"])\n',
        (f"{SFT_ADAPTERS}::test_a_run_of_several_adapters_resumes_bitwise",),
    ),
    Mutant(
        "a resumed run begins with a fresh critic",
        "archon/training/loop.py",
        'self.critic.load_state_dict(state.pop("critic"))',
        'state.pop("critic")',
        ("tests/lora/test_critic.py::test_ppo_trains_two_adapters_on_one_base_and_resumes",),
    ),
    Mutant(
        "the frozen base of a LoRA is saved in place of the LoRA",
        "archon/engine/state.py",
        "if p.requires_grad or not has_lora}",
        "if not (p.requires_grad and has_lora)}",
        (f"{LORA_RESUME}::test_resumed_training_is_bitwise_the_uninterrupted_one",),
    ),
    Mutant(
        "ORPO's odds are those of the summed log-probability",
        "archon/training/preference_kinds.py",
        'LENGTH_NORMALIZED = ("simpo", "orpo")',
        'LENGTH_NORMALIZED = ("simpo",)',
        (PREFERENCE,),
    ),
    Mutant(
        "ORPO's likelihood leaves out the prompt",
        "archon/training/preference_kinds.py",
        'NLL_OF_PROMPTS = ("orpo",)',
        "NLL_OF_PROMPTS: tuple[str, ...] = ()",
        (PREFERENCE,),
    ),
    Mutant(
        "SimPO scales its target margin by beta",
        "archon/training/preference_losses.py",
        '-F.logsigmoid(beta * difference - (gamma if kind == "simpo" else 0.0))',
        '-F.logsigmoid(beta * (difference - (gamma if kind == "simpo" else 0.0)))',
        (PREFERENCE,),
    ),
    Mutant(
        "the likelihood of chosen answers is averaged over pairs, not tokens",
        "archon/training/preference.py",
        "n_pairs / n_tokens * batch",
        "1.0 / n_pairs * batch",
        (PREFERENCE,),
    ),
    Mutant(
        "the margin of a pair is added to its difference",
        "archon/training/preference_losses.py",
        "else difference - margin)",
        "else difference + margin)",
        (PREFERENCE,),
    ),
    Mutant(
        "the log-odds of a likely answer are taken where they round",
        "archon/training/preference_losses.py",
        "near = x > -0.693",
        "near = x > 1",
        (PREFERENCE,),
    ),
    Mutant(
        "KTO's reference point may be negative",
        "archon/training/preference_losses.py",
        "mismatched.detach().mean().clamp(min=0)",
        "mismatched.detach().mean()",
        ("tests/rl/test_kto.py",),
    ),
    Mutant(
        "KTO divides its loss by half of the answers",
        "archon/training/preference.py",
        "WeightedSum(documents_per_unit=1)",
        "WeightedSum()",
        ("tests/rl/test_kto.py",),
    ),
    Mutant(
        "a mismatched answer follows its own prompt",
        "archon/training/preference.py",
        "before = [rows[-1], *rows[:-1]]",
        "before = [*rows]",
        ("tests/rl/test_kto.py",),
    ),
    Mutant(
        "the configuration of fine-tuning imports PyTorch",
        "archon/training/config.py",
        "from archon.data.config import HELD_OUT,",
        "import torch\nfrom archon.data.config import HELD_OUT,",
        ("tests/cli/test_config.py::test_errors_of_a_configuration_need_no_pytorch",),
    ),
)
