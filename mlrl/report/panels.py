"""Which metrics share a chart, what it is called and where it stands; an unknown metric still gets its chart."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

EVALUATION, REWARD, AGENTS = "Evaluation", "Reward and return", "Agents"
CRITICS, PREFERENCES, COST, OTHER = "Critics", "Preferences", "Speed and memory", "Other metrics"
SECTIONS = (EVALUATION, REWARD, AGENTS, CRITICS, PREFERENCES, COST, OTHER)

# Metric without turn and agent → title, what it says. The order is that of the charts within a section.
TITLES = {
    "expected_return": ("Return", "Reward of this turn plus the discounted rewards after it."),
    "reward_mean": ("Reward", "Mean reward of the joint responses, as trained on."),
    "raw_reward_mean": ("Reward before the processor", ""),
    "reached_fraction": ("Branches that get here", "Share of those of a full tree; the others ended early."),
    "reward_std": (
        "Spread of rewards",
        "Over all joint responses, and within a node, which is what the agents learn from.",
    ),
    "zero_std_fraction": (
        "Nodes without signal",
        "Share of nodes whose returns do not differ: nothing is learned there.",
    ),
    "completion_tokens_mean": ("Response length", "Tokens a response."),
    "empty_fraction": ("Empty responses", "Share without any text but white space."),
    "truncated_fraction": ("Truncated responses", "Share that reached max_new_tokens before an end token."),
    "entropy": ("Entropy", "Nats a token. Near 0 the agent says one thing only."),
    "preference/drift/reward_mean": ("Reward of the candidates", "Mean over a round, before it is learned from."),
    "preference/drift/reward_std": ("Spread of the candidates' rewards", "Over all of a round."),
    "preference/loss": ("Preference loss", "−log σ of the scaled margin: 0.693 where nothing is preferred yet."),
    "preference/margin": ("Margin", "Log-probability of winners less that of losers, in nats."),
    "preference/accuracy": ("Accuracy", "Share of pairs whose joint margin is above 0."),
    "loss": ("Policy loss", "Not a measure of progress: it rises and falls around 0 by construction."),
    "reference_kl_mean": ("KL to the initial policy", "Nats a response."),
    "reference_kl_penalty_mean": ("KL penalty", "What the KL costs, in units of reward."),
    "approx_kl": ("KL of the update", "Policy after against policy before, nats a token."),
    "clip_fraction": ("Clipped tokens", "Share of tokens whose importance ratio is clipped."),
    "ratio_max": ("Largest importance ratio", ""),
    "rollout_kl": (
        "Mismatch of sampler and trainer",
        "KL of a sampling server's policy to the trainer's, nats a token.",
    ),
    "rollout_ratio_mean": ("Trainer to sampler", "Mean ratio of their probabilities of a token; 1 where they agree."),
    "rollout_truncated_fraction": ("Capped importance weights", "Share of tokens whose ratio is above the cap."),
    "rollout_staleness": ("Age of rollouts", "Steps that the weights had learned since they drew the batch."),
    "task_reward_correlation": (
        "Learned reward beside the task's",
        "Correlation within a node: 1 where both prefer the same, 0 where it tells nothing.",
    ),
    "advantage_abs_mean": ("Size of advantages", "Mean absolute advantage."),
    "grad_norm": ("Gradient norm", "Before clipping."),
    "grad_clipped_fraction": ("Clipped gradients", "Share of updates whose gradient was clipped."),
    "learning_rate": ("Learning rate", ""),
    "value_loss": ("Value loss", "Squared distance of the critics' values to their targets."),
    "explained_variance": ("Explained variance", "1: the critic predicts every return. 0: no better than their mean."),
    "throughput/generated_tokens_per_s": ("Tokens a second", "Sampled while sampling, trained on while updating."),
    "time/step_s": ("Seconds a step", "Whole step, and its parts; an update is one of possibly several in a step."),
    "memory/peak_gb": ("Peak memory", "GB of the GPU, or of the process where there is none."),
    "total_generated_tokens": ("Tokens sampled so far", ""),
    "nonfinite_fraction": ("Skipped updates", "Share of updates with a NaN or infinite gradient."),
    "truncated_prompt_fraction": ("Truncated prompts", "Share of prompts cut to fit."),
    "reward_failure_fraction": ("Failed rewards", "Share of reward calls without result, scored by reward_fallback."),
}
# Metrics drawn into another one's chart: that one, and what each line there is called.
_SHARED = {
    "reward_std": ("reward_std", "all"),
    "within_node_std": ("reward_std", "within a node"),
    "throughput/generated_tokens_per_s": ("throughput/generated_tokens_per_s", "sampled"),
    "throughput/trained_tokens_per_s": ("throughput/generated_tokens_per_s", "trained on"),
    "time/step_s": ("time/step_s", "step"),
    "time/rollout_s": ("time/step_s", "sampling"),
    "time/reward_s": ("time/step_s", "rewards"),
    "time/rollout_wait_s": ("time/step_s", "waiting for rollouts"),
    "time/reward_model_s": ("time/step_s", "learned rewards"),
    "time/reference_s": ("time/step_s", "KL to the reference"),
    "time/update_s": ("time/step_s", "an update"),
}
_COST_NAMES = ("total_generated_tokens", "nonfinite_fraction", "truncated_prompt_fraction", "reward_failure_fraction")
_STDERR = re.compile(r"(eval/turn_\d+)/reward_stderr")
_TURN = re.compile(r"turn_(\d+)/")
_MEMBER = re.compile(r"(agent|critic|comparator)_(\d+)")


@dataclass
class Panel:
    """One chart.

    Attributes:
        key: unique name, usable as a file name.
        metrics: (metric, variant) pairs; the variant is "" where there is one kind of line.
        stderr: metric → metric with its standard error.
    """

    key: str
    section: str
    title: str
    help: str
    metrics: list[tuple[str, str]] = field(default_factory=list)
    stderr: dict[str, str] = field(default_factory=dict)

    @property
    def counts_trouble(self) -> bool:
        """Whether it shows shares of what happens now and then, so that 0 throughout needs no chart."""
        return self.section != EVALUATION and all(metric.endswith("_fraction") for metric, _ in self.metrics)


def make_panels(names: Iterable[str]) -> list[Panel]:
    """Panels for these metrics, ordered by section, then as in `TITLES`, then by turn.

    With one turn, the return and the share of branches that reach the turn say nothing more and have no panel.
    """
    names = sorted(set(names), key=_natural)
    turns = {match[1] for name in names if (match := _TURN.search(name))}
    if len(turns) == 1:  # then the return is the reward, and every branch reaches the only turn
        names = [name for name in names if not name.endswith(("turn_1/expected_return", "turn_1/reached_fraction"))]
    panels: dict[str, Panel] = {}
    for name in names:
        if _STDERR.fullmatch(name):
            continue
        evaluation, turn, rest, variant = _take_apart(name)
        rest, variant = _SHARED.get(rest, (rest, variant))
        key = "/".join(filter(None, ["eval" if evaluation else "", f"turn_{turn}" if turn else "", rest]))
        if key not in panels:
            title, text = TITLES.get(rest) or TITLES.get(rest.rsplit("/", 1)[-1]) or (_readable(rest), "")
            suffix = f" · turn {turn}" if turn and len(turns) > 1 else ""
            if evaluation and turn:
                text = text.replace(", as trained on", "") + " Episodes of the evaluation set."
            panels[key] = Panel(re.sub(r"[^\w@.-]+", "_", key), _section(name), title + suffix, text.strip())
        panels[key].metrics.append((name, variant))
        if (stderr := name.replace("/reward_mean", "/reward_stderr")) != name and stderr in names:
            panels[key].stderr[name] = stderr
    for panel in panels.values():
        if any(variant.startswith("agent") for _, variant in panel.metrics):
            panel.metrics = [(name, variant or "team") for name, variant in panel.metrics]
    return sorted(panels.values(), key=_place)


def _take_apart(name: str) -> tuple[bool, str, str, str]:
    """(of an evaluation?, turn, metric without turn and member, member), e.g. (False, "1", "loss", "agent 0")."""
    evaluation, rest = name.startswith("eval/"), name.removeprefix("eval/")
    turn = ""
    if match := _TURN.search(rest):
        turn, rest = match[1], rest[: match.start()] + rest[match.end() :]
    variant = ""
    if match := _MEMBER.search(rest):
        variant = f"{match[1]} {match[2]}"
        parts = [part.strip("_") for part in (rest[: match.start()] + rest[match.end() :]).split("/")]
        rest = "/".join(filter(None, parts)) or match[1]
    return evaluation, turn, rest, variant


def _section(name: str) -> str:
    if name.startswith("eval/"):
        return EVALUATION
    if name.startswith("critic"):
        return CRITICS
    if name.startswith(("preference", "comparator", "reward_model")):
        return PREFERENCES
    if name.startswith(("time/", "throughput/", "memory/")) or name in _COST_NAMES:
        return COST
    if "agent_" in name:
        return AGENTS
    return REWARD if _TURN.match(name) else OTHER


def _place(panel: Panel) -> tuple:
    name = panel.metrics[0][0]
    evaluation, turn, rest, _ = _take_apart(name)
    rest = _SHARED.get(rest, (rest, ""))[0]
    order = list(TITLES)
    known = next((order.index(key) for key in (rest, rest.rsplit("/", 1)[-1]) if key in TITLES), len(order))
    if evaluation and turn:
        # a turn's return and reward side by side, turn after turn
        return SECTIONS.index(panel.section), 0, int(turn), known, ""
    return SECTIONS.index(panel.section), 1, known, int(turn or 0), rest


def _readable(name: str) -> str:
    words = name.replace("/", " · ").replace("_", " ").strip()
    return words[:1].upper() + words[1:]


def _natural(name: str) -> list:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
