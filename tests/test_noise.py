"""The noise of replicas: Philox by the paper, and apart from each other."""

import pytest
import torch

import oracles
from oracles import same
from pgprog.noise import STREAMS, ReplicaGenerator

MASK = 2**64 - 1


def philox(key, counter):
    """Philox4x64-10 in plain integers (Salmon et al. 2011, section 3.3 and table 2)."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = (right >> 64) ^ b ^ k0, right & MASK, (left >> 64) ^ d ^ k1, left & MASK
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return [a, b, c, d]


def uniforms(seed, stream, step, n):
    """The first n numbers of a step: blocks of four words, each word's upper 53 bits over 2^53."""
    words = [w for block in range(1, n // 4 + 2) for w in philox((seed, stream), (block, 0, 0, step))]
    return [(word >> 11) / 2**53 for word in words[:n]]


def test_philox_meets_the_published_known_answer():
    """The known-answer test of Random123 for philox4x64-10: all words 0, then all words 2^64 - 1."""
    assert philox((0, 0), (0, 0, 0, 0)) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]
    assert philox((MASK, MASK), (MASK, MASK, MASK, MASK)) == [
        0x87B092C3013FE90B,
        0x438C3C67BE8D0224,
        0x9CC7D7C69CD777B6,
        0xA09CAEBF594F0BA0,
    ]


@pytest.mark.parametrize("stream", STREAMS)
def test_draws_are_a_pure_function_of_seed_stream_and_step(stream):
    generator = ReplicaGenerator([0, 7, 2**63 - 1], stream, step=5)
    draws = torch.cat([generator.uniform(3), generator.uniform(2, 4).flatten(1)], dim=1)
    for k, seed in enumerate(generator.seeds):
        same(draws[k], torch.tensor(uniforms(seed, STREAMS[stream], 5, 11)))


def test_streams_are_numbered_apart_and_for_good():
    """A number that moves would change every recorded run."""
    assert STREAMS == {"init": 0, "train": 1, "evaluate": 2, "resample": 3, "critic": 4}


def test_seek_forgets_what_was_drawn_before():
    generator = ReplicaGenerator([3, 4], "train")
    generator.uniform(5)
    generator.seek(9)
    same(generator.uniform(2, 3), ReplicaGenerator([3, 4], "train", step=9).uniform(2, 3))
    generator.seek(0)
    same(generator.uniform(4), ReplicaGenerator([3, 4], "train").uniform(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_replica_draws_the_same_numbers_whatever_stands_beside_it(dtype):
    beside = ReplicaGenerator([0, 1, 2, 3, 4], "train", step=11)
    alone = ReplicaGenerator([3], "train", step=11)
    turned = ReplicaGenerator([3, 9, 3], "train", step=11)
    for shape in ((7,), (2, 3, 5), (1,)):
        here, there, turn = (g.uniform(*shape, dtype=dtype) for g in (alone, beside, turned))
        assert here.shape == (1, *shape) and there.shape == (5, *shape)
        same(here[0], there[3])
        same(here[0], turn[0])
        same(here[0], turn[2])  # a seed that is given twice draws the same twice


def test_seeds_streams_steps_and_later_draws_all_differ():
    first = ReplicaGenerator([5]).uniform(1000)
    others = [
        ReplicaGenerator([6]).uniform(1000),
        ReplicaGenerator([5], "evaluate").uniform(1000),
        ReplicaGenerator([5], step=1).uniform(1000),
    ]
    generator = ReplicaGenerator([5])
    generator.uniform(1000)
    for other in [*others, generator.uniform(1000)]:
        assert not set(first.flatten().tolist()) & set(other.flatten().tolist())


class Largest:
    """Stands for the bits of a replica whose draws are the largest number below 1."""

    def random(self, shape):
        return torch.full(shape, 1 - 2.0**-53).numpy()


def test_a_float32_draw_is_never_one():
    """1 - 2^-53 rounds to 1.0 in float32; the largest number below 1 is 1 - 2^-24."""
    generator = ReplicaGenerator([0])
    generator._bits = [Largest()]
    same(generator.uniform(2, dtype=torch.float32), torch.full((1, 2), 1 - 2.0**-24, dtype=torch.float32))
    same(generator.uniform(2), torch.full((1, 2), 1 - 2.0**-53))


def test_a_float32_draw_is_the_float64_draw_rounded():
    exact, rounded = (ReplicaGenerator([1, 2]).uniform(1000, dtype=d) for d in (torch.float64, torch.float32))
    same(rounded, exact.to(torch.float32))
    assert rounded.dtype == torch.float32


@pytest.mark.parametrize("seed", [0, 1])
def test_draws_are_uniform(seed):
    """n = 40000 draws, z = 5. mean: sigma^2 = 1/12; second moment: 1/5 - 1/9 = 4/45; products of neighbours: 7/144."""
    n, z = 40000, 5
    u = ReplicaGenerator([seed]).uniform(n)[0]
    assert abs(u.mean() - 1 / 2) < z * (1 / 12 / n) ** 0.5
    assert abs(u.square().mean() - 1 / 3) < z * (4 / 45 / n) ** 0.5
    pairs = u[0::2] * u[1::2]
    assert abs(pairs.mean() - 1 / 4) < z * (7 / 144 / (n / 2)) ** 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "seeds is empty: give at least one"),
        (([0, -1],), r"seed -1 is out of range.*\[0, 2\*\*63\)"),
        (([2**63],), f"seed {2**63} is out of range"),
        (([0], "training"), "unknown stream 'training': choose one of init, train, evaluate, resample, critic"),
    ],
)
def test_wrong_seeds_and_streams_are_refused_by_name(arguments, message):
    with oracles.as_users_run_it(), pytest.raises(ValueError, match=message):
        ReplicaGenerator(*arguments)
