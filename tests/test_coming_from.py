"""docs/coming_from.md: its blocks run, its commands compose, and it has a place for every name of the five texts."""

import re
import shlex
from pydoc import locate

import pytest
import torch

from grpo_lightning.advantage import centered
from grpo_lightning.callbacks.progress import describe
from tests.support.composed import CONF, ROOT, composed
from tests.test_progress import module
from tests.test_readme import COMMANDS, FENCE, commands

PAGE = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
GUIDE, TUTORIAL, DERIVATION, NOTEBOOK, RLOX = SECTIONS.values()
BLOCKS = [block for language, block in FENCE.findall(PAGE) if language == "python"]
HERE = [block for block in BLOCKS if block.startswith("# here\n")]

# Functions, classes, methods and settings that each text names, and symbols of its formulas that are settings.
# ruff: noqa: RUF001
NAMES = {
    "guide": (
        GUIDE,
        """
        GRPOConfig group_size clip_epsilon kl_coef normalize_advantages advantage_eps ppo_epochs GRPOTrainer
        policy reference reward_model tokenizer config optimizer LM RewardModel GRPOStats mean_reward std_reward
        mean_advantage compute_grpo_loss compute_advantages get_rewards log_prob score prompts responses
        old_log_probs zeros i exp clamp minimum neg mean_keepdim std_keepdim mean_all to_scalar from_vec Tensor
        Device torch.zeros torch.stack torch.exp torch.clamp torch.min torch.no_grad detach item requires_grad
        eval train_step _generate_responses _compute_log_prob _get_rewards _compute_advantages _ppo_update
        GRPOBatchTrainer _ppo_update_batch generate max_new_tokens do_sample temperature output_scores
        return_dict_in_generate encode decode return_tensors r_t set_grad_enabled log_softmax gather zero_grad
        backward step policy_loss kl_loss clip_fraction group_mean group_std padding learning_rate batch_size K
        ε β E B D R_i μ_G σ_G D_KL π_θ π_old π_ref γ λ GAE critic PPO DPO REINFORCE per-token per-sequence
        """,
        ["value function V(s)", "V_φ", "pre-training", "entropy bonus", "reward hacking", "mode collapse"],
    ),
    "tutorial": (
        TUTORIAL,
        """
        model_name_or_path dataset_name num_train_epochs max_steps num_generations temperature top_p
        max_completion_length reward_funcs reward_weights learning_rate clip_range kl_penalty output_dir
        accuracy format tag_count value_estimate group_mean_reward group_mean policy_model generate max_tokens
        reward_func repeated_prompts completions batch_metadata rewards_list rewards_per_func final_rewards
        grouped_rewards num_prompts group_means advantages get_log_probs log_probs old_log_probs policy_loss
        ratio clipped_ratio clipped_loss final_loss zero_grad backward step reward/accuracy reward/format
        reward/total advantage/mean advantage/std policy/kl_divergence torch.stack torch.exp torch.clamp
        torch.max load_dataset save_to_disk max_new_tokens WandB DeepSpeed N A_i r̄_p Critic Actor
        """,
        [
            *("AutoModelForCausalLM.from_pretrained", "AutoTokenizer.from_pretrained", "accelerate launch"),
            *("--config", "--config_file", "zero2.yaml", "config_demo.yaml", "config_grpo_tutorial.yaml"),
            *("config_grpo_exercise.yaml", "src/open_r1/grpo.py", 'batch["prompt"]', "./sft_checkpoint"),
        ],
    ),
    "derivation": (
        DERIVATION,
        """
        policy ref_policy reward_model EPS BETA G dataloader batch samples generate max_new_tokens do_sample
        top_p temperature num_return_sequences flat view score rewards mean std torch.clamp torch.min
        torch.no_grad mu sigma clamp_min adv output_hidden_states output_attentions use_cache logits log_softmax
        gather_token_logprobs ref_out ref_logp ratio clamp clipped loss_tokens loss_kl backward step zero_grad q
        o T ε β π_θ π_old π_ref R_φ RM r_t μ_g σ_g GAE V_ψ I GSM8K MATH CMATH
        """,
        ["process rewards", "iterative GRPO", "one PPO update", "refresh reference model", "memory footprint", "fp16"],
    ),
    "notebook": (
        NOTEBOOK,
        """
        AutoModelForCausalLM AutoTokenizer TopKLogitsWarper pad_token new_model old_model reference_model
        prompts from_pretrained return_tensors input_ids attention_mask expand num_samples reduction torch.cat
        torch.exp torch.clamp torch.min torch.mean inputs padding truncation sample_sequences max_length top_k
        n_sample_sequences top_k_warper softmax multinomial generated_sequences new_policy_sequences
        old_policy_sequences reference_policy_sequences compute_sequence_log_probs no_grad log_softmax gather
        new_policy_log_probs old_policy_log_probs reference_log_probs rewards compute_advantages unbiased
        ppo_loss new_probs old_probs advantages epsilon beta reference_probs ratios clipped_ratios
        clipped_objective kl_div F.kl_div ppo_loss_value gpt2 distilgpt2 q P(Q) G o_i r_i A_i Ratio J_GRPO D_KL
        ε β π_old π_ref
        """,
        ["human feedback"],
    ),
    "rlox": (
        RLOX,
        """
        GRPO model ref_model reward_fn group_size kl_coef learning_rate max_new_tokens max_grad_norm n_epochs
        prompts prompt_tensor mean_reward kl compute_batch_group_advantages get_per_token_logprobs
        logprobs_policy logprobs_ref seq_logprobs MyLanguageModel score metrics pi_theta pi_ref G beta Adam
        """,
        [
            "rlox.algorithms.grpo",
            "trainer.train",
            "gradient clipping",
            "value function",
            "critic network",
            "copy.deepcopy",
        ],
    ),
}


@pytest.mark.parametrize("text", NAMES)
def test_every_name_of_a_text_has_a_place(text):
    section, words, phrases = NAMES[text]
    names = [*words.split(), *phrases]
    assert len(names) == len(set(names)) > 25
    missing = [name for name in names if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", section)]
    assert missing == []


@pytest.mark.parametrize("text", NAMES)
def test_a_section_has_both_sides_and_the_errors(text):
    section = NAMES[text][0]
    rows = re.findall(r"^\| .* \|$", section, re.MULTILINE)
    assert len(rows) > 15
    for row in rows:
        cells = row.split("|")[1:-1]
        assert len(cells) in (2, 3), row
        assert all(map(str.strip, cells)), row
    assert "# there\n" in section
    assert "# here\n" in section
    assert len(section.partition("### Where it errs\n")[2].split("\n* ")) > 3


def test_every_block_says_whose_it_is():
    assert len(HERE) >= 13
    for language, block in FENCE.findall(PAGE):
        if language in ("python", "bash"):
            assert block.startswith(("# here\n", "# there\n")), block
            assert block.startswith("# here\n") or len(block.splitlines()) <= 14, (
                block
            )  # of theirs a few lines, as the formatter breaks them


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(HERE)))
def test_a_block_of_ours_runs(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(HERE[number], f"block {number}", "exec"), {"__name__": "__main__"})


def test_its_commands_are_among_those_that_compose():
    found = commands(PAGE)
    assert len(found) >= 18
    assert found <= set(COMMANDS)  # tests/test_readme.py composes them


@pytest.mark.slow
def test_the_tutorials_file_spelled_out_is_the_experiment():
    [command] = [one for one in commands(PAGE) if "policy.path=./sft_checkpoint" in one and "steps=500" in one]
    spelled = composed(*[word for word in shlex.split(command)[2:] if not word.startswith("hydra.")])
    recipe = composed("experiment=open_r1")
    for part in ("rollout", "advantage", "loss", "optimizer", "steps"):
        assert spelled[part] == recipe[part], part
    for name, weight in (("accuracy", 1.0), ("format", 0.1)):
        assert spelled["reward"][name] == recipe["reward"][name]
        assert spelled["reward"][name]["weight"] == weight
    assert spelled["data"] == recipe["data"]


def test_the_guides_ratio_is_that_of_a_response():
    [command] = [one for one in commands(PAGE) if "loss=response_ratio" in one]
    config = composed(*shlex.split(command)[2:])
    assert config["loss"]["surrogate"]["_target_"] == "grpo_lightning.loss.response_clipped"
    assert config["loss"]["kl"]["_target_"] == "grpo_lightning.loss.k1"
    assert config["loss"]["kl_coef"] == 0.1
    assert config["module"]["ppo_epochs"] == 4
    assert config["module"]["minibatch_size"] == 1


def test_the_progress_line_is_one():
    tutorial = {"reward/accuracy": 0.45, "reward/format": 0.98, "reward/total": 0.548}
    tutorial |= {"advantage/mean": 0.0, "advantage/std": 0.32, "policy/kl_divergence": 0.008}
    line = describe(module(tutorial | {"val/pass@1": 0.44, "perf/tokens_per_second": 812.0}), room=64)
    assert len(shown := f"step 10/500  {line}  93 s") == 80
    assert shown in TUTORIAL
    assert f"`{describe(module({'val/pass@1': 0.44}, validated=10), room=64)}`" in TUTORIAL


def settings_here():
    """Keys of settings that the page names, dotted and in backticks, as of any choice of their part."""
    parts = "|".join(path.name for path in CONF.iterdir() if path.is_dir())
    spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", PAGE))
    words = {word.partition("=")[0] for span in spans for word in re.split(r"[ ,]+", span)}
    theirs = {"loss.backward", "optimizer.step", "optimizer.zero_grad", "policy.generate", "trainer.train"}
    return sorted(word for word in words - theirs if re.fullmatch(rf"(?:{parts})(?:\.\w+)+", word))


def test_settings_that_the_page_names_exist():
    choices = ["policy=hf", "reward=[accuracy,format,model]", "callbacks=[reference_refresh,reward_model]"]
    needed = ["policy.path=DIR", "reward.model.function.path=DIR"]
    configs = [composed(*choices, *needed), composed("data=inline", "data.train.prompts=[a]")]
    configs += [composed("data=hub", "data.path=DIR", "reference=another_model", "reference.path=DIR")]

    def exists(key, config):
        for name in key.replace(".NAME.", ".accuracy.").split("."):
            config = config.get(name, KeyError) if isinstance(config, dict) else KeyError
        return config is not KeyError

    keys = settings_here()
    assert len(keys) > 30
    assert [key for key in keys if not any(exists(key, config) for config in configs)] == []


def test_objects_that_the_page_names_exist():
    names = set(re.findall(r"grpo_lightning(?:\.\w+)+", PAGE))
    assert len(names) > 35
    assert [name for name in names if locate(name) is None] == []


# What it says of the texts


def test_the_guides_clip_fraction_counts_ratios_inside_the_range():
    generator = torch.Generator().manual_seed(0)
    ratio = 0.85 + 0.3 * torch.rand(100_000, generator=generator)
    advantage = torch.randn(100_000, generator=generator)
    counted = ratio != ratio.clamp(0.8, 1.2) * advantage / advantage
    assert 0.05 < counted.float().mean() < 0.2
    zero = torch.zeros(4)
    assert (torch.ones(4) != zero / zero).all()


def test_equal_rewards_have_advantages_there_and_none_here():
    rewards = torch.full((1, 6), 0.6)
    distance = rewards - rewards.mean(1, keepdim=True)
    deviation = rewards.std(1, keepdim=True)
    assert float(deviation) == pytest.approx(6.5e-8, rel=0.01)
    assert (distance / (deviation + 1e-8))[0, 0].item() == pytest.approx(0.79, abs=0.01)  # the guide's
    assert (distance / deviation.clamp_min(1e-6))[0, 0].item() == pytest.approx(0.06, abs=0.001)  # the derivation's
    assert centered(rewards).tolist() == [[0.0] * 6]


@pytest.mark.parametrize("size, deviation", [(2, 0.35), (8, 0.47), (16, 0.48), (32, 0.49)])
def test_centered_advantages_vary_more_in_larger_groups(size, deviation):
    rewards = (torch.rand(20_000, size, generator=torch.Generator().manual_seed(size)) < 0.5).float()
    assert centered(rewards).std().item() == pytest.approx((0.25 * (1 - 1 / size)) ** 0.5, abs=0.003)
    assert centered(rewards).std().item() == pytest.approx(deviation, abs=0.01)


def test_the_notebooks_divergence_is_not_a_number():
    new, reference = torch.tensor([[-40.0, -35.0]]), torch.tensor([[-38.0, -41.0]])
    assert torch.nn.functional.kl_div(new, reference, reduction="batchmean").isnan()


def test_the_derivations_penalty_rewards_the_distance():
    # Two tokens, pi_ref = (0.5, 0.5): as pi leaves it, the term falls. -0.04 * sum(0.5 * (log 0.5 - log pi))
    ref = torch.tensor([0.5, 0.5]).log()
    near, far = torch.tensor([0.6, 0.4]).log(), torch.tensor([0.9, 0.1]).log()
    terms = [-0.04 * (ref.exp() * (ref - logp)).sum().item() for logp in (ref, near, far)]
    assert terms[0] == 0 > terms[1] > terms[2]
