/** The client against a running server, whose address is in KVJAX_ADDRESS: tests/serving/server/test_typescript.py starts one with a tiny model. */

import assert from "node:assert/strict";
import { after, test } from "node:test";

import {
  Cancelled,
  Client,
  DeadlineExceeded,
  FailedPrecondition,
  InvalidArgument,
  type Message,
  SessionError,
  SessionNotFound,
  Unauthenticated,
  Unavailable,
  fromOpenAIMessages,
  tokensForChat,
} from "../src/index.js";
import { loadTokenizer } from "../src/tokenizer.js";

const address = process.env.KVJAX_ADDRESS ?? "127.0.0.1:50051";
const token = process.env.KVJAX_TOKEN ?? "";
const client = new Client(address, { token });
const IDS = Array.from({ length: 40 }, (_, number) => (number * 7) % 90);
const NONE = { stopTokenIds: [] };
after(() => client.close());

test("turns, a fork and one append of the same ids generate the same tokens", async () => {
  const session = await client.createSession(IDS);
  const first = session.generate({ maxNewTokens: 5, temperature: 1, seed: -(2n ** 63n), ...NONE });
  const told = await first.all();
  assert.deepEqual([told.length, first.finishReason, first.prefillTokens, first.historyTokens], [5, "length", 40, 45]);
  assert.equal(await session.append([1, 2]), 47);
  const fork = await session.fork();
  const whole = await client.createSession([...IDS, ...told, 1, 2]);
  const answers = [];
  for (const each of [session, fork, whole]) answers.push(await each.generate({ maxNewTokens: 6, ...NONE }).all());
  assert.deepEqual(answers[1], answers[0]);
  assert.deepEqual(answers[2], answers[0]);
  const info = await session.info();
  assert.deepEqual([info.historyTokens, info.generating, info.violations.inv1], [53, false, 0]);
  assert.equal((await client.session(session.id)).length, 53);
  for (const each of [session, fork, whole]) await each.close();
});

test("a stop token ends a generation and joins the history", async () => {
  const session = await client.createSession(IDS);
  const fork = await session.fork();
  const told = await session.generate({ maxNewTokens: 8, ...NONE }).all();
  const stopped = fork.generate({ maxNewTokens: 8, stopTokenIds: [told[2]!] });
  const until = told.indexOf(told[2]!) + 1;
  assert.deepEqual(await stopped.all(), told.slice(0, until));
  assert.deepEqual([stopped.finishReason, fork.length], ["stop", 40 + until]);
  await session.close();
  await fork.close();
});

test("what was iterated over before a break joins the history", async () => {
  const session = await client.createSession(IDS);
  const heard: number[] = [];
  for await (const each of session.generate({ maxNewTokens: 300, ...NONE })) {
    heard.push(each);
    if (heard.length === 3) break;
  }
  assert.equal(session.length, 43);
  assert.equal((await session.info()).historyTokens, 43);
  const whole = await client.createSession([...IDS, ...heard]);
  assert.deepEqual(await session.generate({ maxNewTokens: 4, ...NONE }).all(), await whole.generate({ maxNewTokens: 4, ...NONE }).all());
  await session.close();
  await whole.close();
});

test("a signal or a deadline ends a generation, and leaves the history as it was", async () => {
  const session = await client.createSession(IDS);
  const abort = new AbortController();
  const cut = session.generate({ maxNewTokens: 300, signal: abort.signal, ...NONE });
  await assert.rejects(async () => {
    for await (const _ of cut) abort.abort();
  }, Cancelled);
  await assert.rejects(session.generate({ maxNewTokens: 300, timeoutMs: 30, ...NONE }).all(), DeadlineExceeded);
  await assert.rejects(session.generate({ signal: abort.signal }).all(), Cancelled);
  assert.equal((await session.info()).historyTokens, 40);
  assert.equal((await session.generate({ maxNewTokens: 2, ...NONE }).all()).length, 2);
  await session.close();
});

test("errors are typed, and name the field or the reason", async () => {
  const session = await client.createSession();
  await assert.rejects(session.generate().all(), FailedPrecondition);
  await assert.rejects(session.append([4_000_000]), (error: SessionError) => error instanceof InvalidArgument && error.field === "tokens");
  const wrong = (field: string) => (error: unknown) => error instanceof InvalidArgument && error.field === field;
  await assert.rejects(session.append([-1]), wrong("token_ids"));
  await assert.rejects(client.createSession([2 ** 32]), wrong("token_ids"));
  assert.throws(() => session.generate({ seed: 1.5 }), wrong("seed"));
  for (const seed of [2 ** 53, 2n ** 63n, -(2n ** 63n) - 1n]) assert.throws(() => session.generate({ seed }), wrong("seed"));
  assert.throws(() => session.generate({ temprature: 1 } as object), wrong("temprature"));
  await session.append([1]);
  await assert.rejects(session.generate({ temperature: -1 }).all(), (error: SessionError) => error.field === "temperature");
  const stale = await client.session(session.id);
  await session.append([2]);
  await assert.rejects(stale.append([3]), (error: SessionError) => error instanceof InvalidArgument && error.field === "at");
  await assert.rejects(client.createSession([], { policy: "no" }), (error: SessionError) => error.field === "policy");
  await session.close();
  await assert.rejects(session.info(), (error: SessionError) => error instanceof SessionNotFound && error.reason === "close");
  await assert.rejects(client.session("0".repeat(32)), (error: SessionError) => error.reason === "unknown" && error.code === "NOT_FOUND");
  const once = client.createSession(IDS).then((each) => each.generate());
  const generation = await once;
  await generation.all();
  await assert.rejects(generation.all(), /iterated over once/);
});

test("a wrong token is an error of its own", { skip: token ? false : "the server wants none: KVJAX_TOKEN is not set" }, async () => {
  const stranger = new Client(address, { token: "not-the-right-token" });
  await assert.rejects(stranger.createSession(), Unauthenticated);
  stranger.close();
});

test("a missing server is an error of its own", async () => {
  const nowhere = new Client("127.0.0.1:1", { retries: 1 });
  const began = Date.now();
  await assert.rejects(nowhere.session("0".repeat(32)), Unavailable);
  assert.ok(Date.now() - began >= 100, "calls that are safe are sent again");
  nowhere.close();
});

const QWEN =
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" +
  "{% if add_generation_prompt %}<|im_start|>assistant\n" +
  "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}";

test("chat templates are rendered turn by turn", async () => {
  const { Template } = await import("@huggingface/jinja");
  const template = new Template(QWEN);
  const tokenizer = {
    eosToken: "<|im_end|>",
    encode: (text: string) => Array.from(text, (each) => each.charCodeAt(0)),
    render: (messages: readonly Message[], generationPrompt: boolean, options: Record<string, unknown>) =>
      template.render({ messages, add_generation_prompt: generationPrompt, ...options }),
  };
  const text = (ids: number[]) => String.fromCharCode(...ids);
  const [user, answer, second] = [
    { role: "user", content: "Hi" },
    { role: "assistant", content: "Yes" },
    { role: "user", content: "So?" },
  ] as const;
  const options = { enable_thinking: false };
  const first = text(tokensForChat([user], tokenizer, options));
  const again = text(fromOpenAIMessages([user, answer, second], tokenizer, options));
  assert.ok(!again.startsWith(first), "the hazard: the think block is not rendered again");
  const more = text(tokensForChat([second], tokenizer, { after: [user, answer], ...options }));
  const head = (said: string) => `<|im_start|>user\n${said}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n`;
  assert.equal(`${first}Yes<|im_end|>${more}`, `${head("Hi")}Yes<|im_end|>\n${head("So?")}`);
  const cut = text(tokensForChat([second], tokenizer, { after: [user, answer], stopped: false, ...options }));
  assert.equal(cut, `<|im_end|>${more}`);
});

test("the embedded model's tokenizer gives back the text", () => {
  const tokenizer = loadTokenizer(process.env.KVJAX_TOKENIZER ?? "../../../models/needle");
  const said = "The pass key for golden river is 48213.";
  assert.equal(tokenizer.decode(tokenizer.encode(said)), said);
  assert.deepEqual(tokenizer.encode(said).slice(0, 3).length, 3);
});

test("what JavaScript lets through is refused, and not sent as something else", async () => {
  const session = await client.createSession([1]);
  const wrong = [[1, , 2], [1, undefined], "12", undefined, new Set([1])] as unknown as number[][];
  for (const ids of wrong) await assert.rejects(session.append(ids), { constructor: InvalidArgument, field: "token_ids" });
  assert.equal(await session.append(new Uint32Array([2, 3]) as unknown as number[]), 3);
  for (const timeoutMs of [NaN, "5" as unknown as number]) {
    await assert.rejects(session.generate({ timeoutMs }).all(), { constructor: InvalidArgument, field: "timeoutMs" });
  }
  for (const timeoutMs of [Infinity, 1e15]) {
    assert.equal((await session.generate({ timeoutMs, maxNewTokens: 1, ...NONE }).all()).length, 1);
  }
  const other = new Client(address, { token });
  const theirs = await other.session(session.id);
  other.close();
  for (const call of [() => other.createSession([1]), () => theirs.info(), () => theirs.generate().all()]) {
    await assert.rejects(call(), { constructor: FailedPrecondition });
  }
  await session.close();
});
