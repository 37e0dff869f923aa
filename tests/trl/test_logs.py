"""What a private trainer logs, name by name: released values, and apart from them public ones."""

from dprlhf.trl.logs import as_evaluation, as_logs

METRICS = {
    "round": 3, "private_reward_noised": 0.0, "private_reward_noise_std": None,
    "released_gradient_norm": 2.0, "public_kl": 0.5, "public_reward": 1.5, "public_longest": None,
    "learning_rate": 0.1,
}  # fmt: skip


def test_a_rounds_logs_are_its_released_values_alone() -> None:
    logs = as_logs(METRICS, {"reward": "rewards/length/mean", "valid_share": "valid"})
    assert logs == {
        "reward": 0.0, "rewards/length/mean": 0.0, "grad_norm": 2.0, "learning_rate": 0.1,
    }  # fmt: skip


def test_an_evaluation_has_public_values_alone() -> None:
    assert as_evaluation(METRICS) == {"eval_kl": 0.5, "eval_reward": 1.5}
    assert as_evaluation(METRICS, "test") == {"test_kl": 0.5, "test_reward": 1.5}
