"""One process of a job of several, for `test_processes.py`: `python process_job.py SCENARIO PORT COUNT NUMBER DEVICES
FOLDER`.

Each process writes what it found to standard output, as JSON.
"""

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from tiny_models import make_family, shallow

import kvjax
from kvjax.cost_model import Auto, Bound, CostModel, Evidence, ExchangeTerm, Price
from kvjax.cost_model.predict import sizes_of
from kvjax.model.identity import fingerprint
from kvjax.policies.decode import HeavyPages, Stateless, TopBlocks

PAGE, CHUNK, STEPS = 16, 64, 10
POLICIES = {2: TopBlocks(k=3, sink=1, local=2, block_size=16), 4: HeavyPages(3)}
MESHES = {2: {"tensor": 2}, 4: {"tensor": 2, "context": 2}}
POLICY_OF = {"brief": "dense", "lost": "dense", "auto": "auto", "reuse": "dense"}
"""Of the engines of some scenarios."""


@dataclasses.dataclass(frozen=True)
class Fails(Stateless):
    """A policy that fails, everywhere or in the second process alone."""

    everywhere: bool
    chooses_over_devices = True

    def select(self, query, layer, ctx, state):
        if self.everywhere or jax.process_index() == 1:
            raise ArithmeticError("no list today")
        return None, state


def prompts_of(model):
    """Prompts of different lengths."""
    draw = np.random.default_rng(5)
    return [draw.integers(0, model.config.vocab_size, size).tolist() for size in (150, 37, 91, 203, 12)]


def engine_of(devices, policy=None, stores=False):
    """An engine whose pool is too small for all prompts at once. stores: whether it keeps pages for later prompts, also
    in host memory."""
    sizes = {"pages": 20, "page_size": PAGE, "prefill_chunk": CHUNK, "batch_buckets": (4,)}
    model = shallow(make_family("llama"))
    sizes |= {"host_bytes": 24 * model.config.cache_spec(PAGE).bytes_per_page("full")} if stores else {}
    if policy == "auto":
        policy, sizes["pages"] = chooses(model.config), 80
    return kvjax.Engine(model, policy or POLICIES[devices], mesh=kvjax.mesh(**MESHES[devices]), **sizes)


def chooses(config):
    """`auto` by planted times: long sequences are faster with lists, also on a mesh."""
    measured = tuple((2, 1, batch, 1, 2**20) for batch in (1, 64))
    term = ExchangeTerm("it", 0.0, 1e11, 0.0, ("dense", "quest:0"), measured)
    sizes = {"device": "chip", "model": "it", "sizes": sizes_of(config), "dtype": "float32", "bytes_per_s": 1e6, "c0": 0.0}
    sizes |= {"exchanges": term, "c1": (("quest:0", Price(0.0)),), "measured": ((1, 1, 2**20), (64, 1, 2**20))}
    cost = CostModel(**sizes, error=0.0, source="planted")
    row = Evidence("m", "f", "quest:0", 2**20, kl=0.01, task="needle", haystack="codes", valid=200, lost=0, source="planted")
    return Auto("assured", Bound(config, "float32", PAGE, "f", cost, (row,)))


def alike(engine, folder):
    """Calls that every process makes by itself."""
    (sequence,) = engine.prefill([prompts_of(engine.model)[0][:-1]])
    engine.save(sequence, f"{folder}/sequence")
    twins = [sequence, engine.restore(f"{folder}/sequence")]
    logits = [np.asarray(engine.extend(each, [7])) for each in twins]
    for each in twins:
        engine.free(each)
    try:
        kvjax.Scheduler(engine, max_gap_ms=5.0)
        gap = "taken"
    except ValueError as error:
        gap = str(error)
    return {
        "gap": gap,
        "fingerprint": fingerprint(engine.model),
        "logits": logits[0].tolist(),
        "restored": bool((logits[0] == logits[1]).all()),
    }


def answers(engine, **options):
    """Tokens and log-probabilities of all prompts, and how often a sequence was suspended."""
    scheduler = kvjax.Scheduler(engine, slots=4, **options)
    sampling = kvjax.Sampling(STEPS * 3, ignore_eos=True, logprobs=True)
    handles = [scheduler.submit(kvjax.Request(prompt, sampling, number)) for number, prompt in enumerate(prompts_of(engine.model))]
    several = kvjax.Sampling(STEPS, temperature=0.7, seed=3, n=2, ignore_eos=True, logprobs=True)
    handles.append(scheduler.submit(kvjax.Request(prompts_of(engine.model)[2], several, "several")))
    dropped = scheduler.submit(kvjax.Request([1, 2, 3], sampling, object()))
    for _ in range(3):
        scheduler.step()
    scheduler.cancel(dropped)
    while not scheduler.idle:
        scheduler.step()
    done = [choice for handle in handles for choice in (handle.completion.choices or (handle.completion,))]
    scheduler.close()
    return {"answers": [[list(each.token_ids), list(each.logprobs)] for each in done], "suspended": scheduler.preemptions}


def job(engine):
    """All answers, and again with slices of prefill between the steps; what is refused; Ctrl-C; an error that all
    processes meet."""
    found = answers(engine) | {"again": answers(engine, max_gap_ms=5.0)}
    try:
        engine.prefill([[1, 2, 3]])
    except RuntimeError as error:
        found["alone"] = str(error)
    (bad,) = kvjax.generate(engine, [[10**6]], max_new_tokens=1, on_error="return")
    prompt, chunks = prompts_of(engine.model)[3], []
    expected = kvjax.generate(engine, [prompt], max_new_tokens=4, details=True)[0].token_ids

    def press(count):
        chunks.append(count)
        os.kill(os.getpid(), signal.SIGINT)

    scheduler = kvjax.Scheduler(engine, on_prefill=press)
    scheduler.submit(kvjax.Request(prompt, kvjax.Sampling(4)))
    try:
        scheduler.step()
    except KeyboardInterrupt:
        found["interrupted after"] = len(chunks)
    scheduler.close()
    try:
        kvjax.generate(engine, [prompt], policy=Fails(True), max_new_tokens=4)
    except ArithmeticError as error:
        found["everywhere"] = str(error)
    schedulers = [kvjax.Scheduler(engine) for _ in range(3)]
    del schedulers[0], scheduler  # numbers of those that are gone are not given again
    schedulers.append(kvjax.Scheduler(engine))
    handles = [each.submit(kvjax.Request(prompt, kvjax.Sampling(2))) for each in schedulers]
    for each in schedulers:
        while not each.idle:
            each.step()
    found["several"] = len({each.completion.token_ids for each in handles})
    found["same"] = kvjax.generate(engine, [prompt], max_new_tokens=4, details=True)[0].token_ids == expected
    return found | {"bad token": str(bad), "used": engine.used_bytes}


def brief(engine):
    """One answer."""
    (found,) = kvjax.generate(engine, prompts_of(engine.model)[:1], max_new_tokens=6, logprobs=True, details=True)
    return {"answers": [[list(found.token_ids), list(found.logprobs)]]}


def reuse(engine):
    """The answers of all prompts, which find pages of the prompts before them more and more often, and what the stores
    did."""
    rounds = [answers(engine) for _ in range(3)]
    stats = engine.stats()
    counts = [stats.found_tokens, stats.device.hits, stats.device.evictions, stats.host.hits, stats.host.evictions]
    return {"rounds": [each["answers"] for each in rounds], "counts": counts}


def auto(engine):
    """A long answer and a short one, and what `auto` chose for each."""
    prompt, found = np.random.default_rng(5).integers(0, engine.model.config.vocab_size, 900).tolist(), []
    for length in (900, 50):
        (answer,) = kvjax.generate(engine, [prompt[:length]], max_new_tokens=6, logprobs=True, details=True)
        found.append([str(engine.last_choice.policy), list(answer.token_ids), list(answer.logprobs)])
    return {"answers": [each[1:] for each in found], "chosen": [each[0] for each in found]}


def lost(engine, folder):
    """One answer, which is printed, and then steps without an end. The last process kills itself when these have
    begun."""
    print(json.dumps(brief(engine)), flush=True)
    Path(folder, "answered").touch()
    scheduler = kvjax.Scheduler(engine)
    while True:
        if scheduler.idle:
            scheduler.submit(kvjax.Request([1, 2, 3], kvjax.Sampling(60, ignore_eos=True)))
        scheduler.step()


def fails(engine):
    """A policy that fails in the second process alone."""
    kvjax.generate(engine, [[1, 2, 3]], policy=Fails(False), max_new_tokens=4)


def die_in_a_step(folder):
    """End this process by the signal that nothing can hold back, half a second after the first answer."""
    while not Path(folder, "answered").exists():
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


SCENARIOS = {"job": job, "brief": brief, "auto": auto, "fails": fails, "reuse": reuse}


def main():
    scenario, (port, count, number, devices), folder = sys.argv[1], map(int, sys.argv[2:6]), sys.argv[6]
    jax.config.update("jax_num_cpu_devices", devices)
    scenarios = SCENARIOS | {"lost": lambda engine: lost(engine, folder)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
    with kvjax.start_processes(f"localhost:{port}", count, number) as processes:
        engine = engine_of(count * devices, POLICY_OF.get(scenario), stores=scenario == "reuse")
        found = {"alike": alike(engine, folder)} if scenario == "job" else {}
        found["shared"] = processes.share(f"from {number}")
        if number:
            if scenario == "lost":
                print(json.dumps(found), flush=True)
                if number == count - 1:
                    threading.Thread(target=die_in_a_step, args=(folder,), daemon=True).start()
            processes.follow(engine)
        else:
            with processes.lead(engine):
                found |= scenarios[scenario](engine)
        print(json.dumps(found))


if __name__ == "__main__":
    main()
