"""What a person reads is what was measured: every cell of the tables against a summary made by hand."""

from pgprog.report.tables import differences, equal, interval, markdown, noise, scores, seeds


def score(mean, low, high, each):
    return {"mean": mean, "ci95": [low, high], "seeds": each}


def entry(title, mean, **more):
    again = {"steps": 7, "rollouts": 448, "success": score(mean / 4, mean / 5, mean / 3, [mean / 4])}
    return {
        "title": title,
        "exceptions": [],
        "steps": 30,
        "steps_planned": 40,
        "rollouts": 1234,
        "tokens": 6170.0,
        "wall_seconds": 12.4,
        "success": score(mean, mean - 0.1, mean + 0.05, [mean, mean]),
        "success_sum_targets": score(mean / 2, mean / 2, mean / 2, [mean / 2]),
        "at_equal_rollouts": again,
    } | more


SUMMARY = {
    "command": "pgprog compare --seeds 2",
    "created": "2026-01-01",
    "environment": {"pgprog": "0.1.0"},
    "interrupted": False,
    "notes": ["A note."],
    "config": {"seeds": 2},
    "equal_rollouts": 500,
    "algorithms": {"rloo": entry("RLOO", 0.6), "grpo": entry("GRPO", 0.8, steps=40, exceptions=["an exception"])},
    "paired_differences": [{"from": "rloo", "to": "grpo", "difference": score(0.2, -0.15, 0.25, [-0.15, 0.25])}],
    "gradient_noise": {
        "rloo": {
            "resamples": 50,
            "rollouts": 64,
            "prompts": 8,
            "mean_norm": 0.1,
            "var_norm": 0.2,
            "mean_squared_norm": 0.3,
            "trace_covariance": 0.4,
            "no_gradient": 0.25,
        }
    },
}


def test_an_interval_is_mean_low_high():
    assert interval(score(0.5, 0.25, 0.75, [])) == "0.500 [0.250, 0.750]"
    assert interval(score(0.5, None, None, [0.5])) == "0.500"


def test_every_cell_stands_where_its_column_says():
    assert scores(SUMMARY).rows == [
        ("RLOO", "0.600 [0.500, 0.650]", "30 of 40", "1,234", "6,170", "12"),
        ("GRPO", "0.800 [0.700, 0.850]", "40", "1,234", "6,170", "12"),
    ]
    assert seeds(SUMMARY).rows == [("RLOO", ".600 .600", "0.300"), ("GRPO", ".800 .800", "0.400")]
    assert equal(SUMMARY).rows[1] == ("GRPO", "0.200 [0.160, 0.267]", "7", "448")
    assert differences(SUMMARY).rows == [("RLOO to GRPO", "0.200 [-0.150, 0.250]", "-.150 +.250")]
    assert noise(SUMMARY).rows == [("RLOO", "8 x 8", "0.1000", "0.20000", "0.30000", "0.40000", "25%")]


def test_the_page_holds_the_tables_the_exceptions_the_notes_and_the_command():
    page = markdown(SUMMARY)
    assert page.startswith("Made by `pgprog compare --seeds 2`")
    assert "| RLOO | 0.600 [0.500, 0.650] | 30 of 40 | 1,234 | 6,170 | 12 |" in page
    assert "Exception from the shared settings, GRPO: an exception." in page
    assert "A note." in page
