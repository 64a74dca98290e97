"""Checks of settings that depend on whether the student samples. Each raises ValueError with the way out."""

from nemo_opd.config.loss import BytePrefixTerm, SampledKLTerm, TCADTerm
from nemo_opd.config.objective import GRPOLoss, SelectTeacher, WeightedSum
from nemo_opd.config.reward import is_paid_by_environment
from nemo_opd.config.rollout import CalculatorEnvironment, Rollouts, ServerRollout
from nemo_opd.config.run_fields import RunFields

_ONLY_ON_POLICY = ("reward", "environment")


def check_off_policy(config: RunFields) -> None:
    """Check a run without rollouts."""
    for key in _ONLY_ON_POLICY:
        if getattr(config, key) is not None and (key != "reward" or config.evaluation is None):
            raise ValueError(f"{key} is for the student's samples, and this run samples nothing; add rollout=hf")
    if isinstance(config.loss, GRPOLoss):
        raise ValueError("loss.type=grpo learns from rollouts, and this run has none; add rollout=hf")
    for i in range(len(config.active_teachers)):
        if isinstance(config.term(i), SampledKLTerm):
            raise ValueError(
                f"{_term_key(config, i)}.type=sampled_kl reads only tokens that the student sampled, and this run "
                "samples none; add rollout=hf, or use loss=same_vocab"
            )

    if config.evaluation is not None:
        config.evaluation.check_answers("evaluation.", config.reward, config.environment)
    _check_new_tokens(config)


def check_on_policy(config: RunFields) -> None:
    rollout = config.rollout
    assert rollout is not None
    _check_rollouts(config, rollout)
    _check_rewards(config)
    _check_rollout_weights(config)
    _check_losses(config, rollout)


def _check_new_tokens(config: RunFields) -> None:
    """Check that answers leave room for a question if no rollout settings limit their length."""
    evaluation = config.evaluation
    if evaluation is None or config.rollout is not None:
        return
    for name in evaluation.all_sets:
        new = config.new_tokens(name)
        if new >= config.train.max_length:
            key = f"evaluation.sets.{name}.max_new_tokens" if name else "evaluation.max_new_tokens"
            raise ValueError(
                f"{key}={new} leaves no room for a question in train.max_length={config.train.max_length}; lower {key} "
                "or raise train.max_length"
            )


def _check_rollouts(config: RunFields, rollout: Rollouts) -> None:
    """Check that rollouts fill batches and fit into sequences, and that the data have the responses that are needed."""
    data, size, n = config.data, config.train.global_batch_size, rollout.n
    if size % n:
        raise ValueError(
            f"train.global_batch_size={size} counts rollouts, so it must be a multiple of rollout.n={n}; write "
            f"train.global_batch_size={-(-size // n) * n}"
        )
    longest, new = config.train.max_length, rollout.max_new_tokens
    if new >= longest:
        raise ValueError(
            f"rollout.max_new_tokens={new} leaves no room for a prompt in train.max_length={longest}; lower "
            "rollout.max_new_tokens or raise train.max_length"
        )
    if (prompt := rollout.max_prompt_length) is not None and prompt >= longest:
        raise ValueError(
            f"rollout.max_prompt_length={prompt} leaves no room for a response in train.max_length={longest}; lower "
            "rollout.max_prompt_length or raise train.max_length"
        )
    if data.response_key is not None and data.is_chat:
        raise ValueError(
            f"data.response_key={data.response_key}: with data.messages_key the response is the assistant's last "
            "message; leave one of the two out"
        )
    if rollout.on_policy_share < 1 and not data.is_chat and data.response_key is None:
        raise ValueError(
            f"rollout.on_policy_share={rollout.on_policy_share:g} takes some responses from the data; name their "
            "column as data.response_key"
        )
    if config.environment is not None and not config.data.is_chat:
        raise ValueError("environment: turns need conversations; name their column as data.messages_key")


def _check_rewards(config: RunFields) -> None:
    reward = config.reward
    if reward is not None and config.environment is None and is_paid_by_environment(reward):
        raise ValueError("reward.type=environment: there is no environment; set environment, or another reward")
    if (
        reward is not None
        and is_paid_by_environment(reward)
        and isinstance(config.environment, CalculatorEnvironment)
        and reward.answer_column is None
    ):
        raise ValueError(
            "environment.type=calculator rewards the right answer, and reward.answer_key names no column with it; "
            "write reward.answer_key=answer"
        )
    if reward is None and isinstance(config.loss, GRPOLoss):
        raise ValueError("loss.type=grpo learns from rewards; set reward, such as reward=numeric")
    if config.evaluation is not None:
        config.evaluation.check_answers("evaluation.", reward, config.environment)


def _check_rollout_weights(config: RunFields) -> None:
    """Check that rollouts are weighted in one way only, and that teachers score a text once."""
    for i, alpha in enumerate(confidence_alphas(config)):
        if alpha is None:
            continue
        key = f"{_term_key(config, i)}.power_alpha"
        if config.reward is not None and config.reward.weighting_beta is not None:
            raise ValueError(
                f"{key} and reward.weighting_beta both weigh rollouts; write {key}=null, or leave weighting_beta out"
            )
        aggregation = config.aggregation
        if isinstance(aggregation, SelectTeacher) or (
            isinstance(aggregation, WeightedSum) and aggregation.score is not None
        ):
            raise ValueError(
                f"{key} weighs rollouts by the teacher's log-probability, and aggregation needs "
                f"another score of the teachers; write {key}=null, or aggregation=weighted_sum"
            )


def _check_losses(config: RunFields, rollout: Rollouts) -> None:
    """Check that losses get what they compare: several rollouts, sampling probabilities, exact targets."""
    if isinstance(config.loss, GRPOLoss) and config.logging.gradients_every is not None:
        raise ValueError(
            "logging.gradients_every compares KD with CE, and loss.type=grpo has a third gradient; write "
            "logging.gradients_every=null"
        )
    if isinstance(config.loss, GRPOLoss) and rollout.n == 1:
        raise ValueError("rollout.n=1: loss.type=grpo compares the rollouts of a prompt; write rollout.n=4 or more")
    terms = [config.term(i) for i in range(len(config.active_teachers))]
    has_cuts = rollout.top_p < 1 or rollout.top_k is not None
    needs_probabilities = isinstance(config.loss, GRPOLoss) or any(isinstance(term, SampledKLTerm) for term in terms)
    if needs_probabilities and has_cuts and isinstance(rollout, ServerRollout) and rollout.program == "sglang":
        key = f"rollout.top_p={rollout.top_p:g}" if rollout.top_p < 1 else f"rollout.top_k={rollout.top_k}"
        raise ValueError(
            f"{key}: the loss weighs tokens by the probability with which they were sampled, and "
            "rollout.program=sglang does not return it after top-k and top-p; leave them out, or use "
            "rollout.program=vllm or rollout=hf"
        )
    if config.loss.scaling == "dynamic" and rollout.on_policy_share == 1:
        raise ValueError(
            "loss.scaling=dynamic scales KD by CE, which is computed on sequences of the dataset, and "
            "rollout.on_policy_share=1 uses none; write loss.scaling=fixed, or lower rollout.on_policy_share"
        )
    for i, term in enumerate(terms):
        if isinstance(term, BytePrefixTerm) and term.positions == "all" and term.ends == "drop":
            raise ValueError(
                f"{_term_key(config, i)}.ends=drop: its targets are exact on average over texts from the teacher's "
                f"distribution, and not over the student's samples; write {_term_key(config, i)}.ends=cover"
            )


def confidence_alphas(config: RunFields) -> list[float | None]:
    """Return for each active teacher the `power_alpha` that weights rollouts by its confidence; None if it has none."""
    terms = map(config.term, range(len(config.active_teachers)))
    is_on_policy = config.rollout is not None
    return [term.power_alpha if is_on_policy and isinstance(term, TCADTerm) else None for term in terms]


def longest_prompt(config: RunFields) -> int:
    """Return the maximum tokens of a prompt, or of a question without rollouts; longer ones are dropped."""
    rollout = config.rollout
    if rollout is not None:
        return rollout.max_prompt_length or config.train.max_length - rollout.max_new_tokens
    assert config.evaluation is not None
    return config.train.max_length - min(map(config.new_tokens, config.evaluation.all_sets), default=1)


def _term_key(config: RunFields, teacher: int) -> str:
    return f"teachers.{teacher}.loss" if config.teachers[teacher].loss else "loss"
