/** The calls of the protocol, made from runtime.proto, and its messages as TypeScript sees them. */

import { type Client as GrpcClient, type ServiceClientConstructor, loadPackageDefinition } from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import { fileURLToPath } from "node:url";

import { InvalidArgument } from "./errors.js";

const PROTO = fileURLToPath(new URL("../runtime.proto", import.meta.url));

/** How a generation is sampled. What is left out has its default: 128 new tokens, greedy, seed 0, the model's end-of-sequence tokens. */
export interface Sampling {
  maxNewTokens?: number;
  temperature?: number;
  topK?: number;
  topP?: number;
  minP?: number;
  /** An integer of 64 bits; a bigint beyond 2 ** 53. */
  seed?: number | bigint;
  /** Tokens that end it; [] for none. */
  stopTokenIds?: readonly number[];
  repetitionPenalty?: number;
  presencePenalty?: number;
  frequencyPenalty?: number;
}

const LARGEST = 2 ** 32 - 1;
const WHOLE = new Set(["maxNewTokens", "topK"]);
const FIELDS = new Set([...WHOLE, "seed", "temperature", "topP", "minP", "repetitionPenalty", "presencePenalty", "frequencyPenalty"]);

/** The message of sampling fields. InvalidArgument for one that there is not, or a wrong value: protobuf would change it silently. */
export function samplingMessage(sampling: Sampling): Record<string, unknown> {
  const message: Record<string, unknown> = {};
  for (const [name, value] of Object.entries(sampling)) {
    if (value === undefined) continue;
    if (name === "stopTokenIds") {
      message.stopTokens = { tokenIds: checkedTokens(value as readonly number[]) };
    } else if (name === "seed") {
      message.seed = checkedSeed(value);
    } else if (!FIELDS.has(name)) {
      throw new InvalidArgument(`there is no ${name} in a generation: its fields are ${[...FIELDS].join(", ")} and stopTokenIds`, name);
    } else if (WHOLE.has(name) ? !isToken(value) : typeof value !== "number") {
      const wanted = WHOLE.has(name) ? "whole number from 0 on" : "number";
      throw new InvalidArgument(`${name} must be a ${wanted}, got ${String(value)}`, name);
    } else {
      message[name] = value;
    }
  }
  return message;
}

/** A seed as it is sent. A number beyond 2 ** 53 may not be the one that was written. */
function checkedSeed(seed: unknown): string {
  if (Number.isSafeInteger(seed) || (typeof seed === "bigint" && BigInt.asIntN(64, seed) === seed)) return String(seed);
  throw new InvalidArgument(`seed must be an integer of 64 bits, a bigint beyond 2 ** 53, got ${String(seed)}`, "seed");
}

/** Token ids as they are sent. InvalidArgument for what is none. */
export function checkedTokens(tokenIds: readonly number[]): number[] {
  const ids: unknown = tokenIds;
  if (!Array.isArray(ids) && !ArrayBuffer.isView(ids)) {
    throw new InvalidArgument(`token ids must be an array, got ${String(ids)}`, "token_ids");
  }
  const wrong = tokenIds.findIndex((each) => !isToken(each)); // not `find`: a hole in an array is undefined, and would be sent as 0
  if (wrong >= 0) throw new InvalidArgument(`token ids must be whole numbers from 0 on, got ${String(tokenIds[wrong])}`, "token_ids");
  return [...tokenIds];
}

/** The deadline of a call. InvalidArgument for what is no number: gRPC would throw where nobody can catch it. None from 24 days on. */
export function deadlineIn(timeoutMs: number): { deadline?: number } {
  if (typeof timeoutMs !== "number" || Number.isNaN(timeoutMs)) {
    throw new InvalidArgument(`timeoutMs must be a number, got ${String(timeoutMs)}`, "timeoutMs");
  }
  return timeoutMs < 2 ** 31 - 1 ? { deadline: Date.now() + timeoutMs } : {};
}

function isToken(value: unknown): boolean {
  return Number.isInteger(value) && (value as number) >= 0 && (value as number) <= LARGEST;
}

/** One message of Generate. */
export interface GenerateResponse {
  event?: "tokens" | "truncated" | "finished";
  tokens?: { tokenIds: number[] };
  truncated?: { droppedTokens: number };
  finished?: { reason: string; historyTokens: number; prefillTokens: number };
}

/** The constructor of the service's client. */
export function runtimeService(): ServiceClientConstructor {
  const options = { longs: Number, enums: String, defaults: true, arrays: true, objects: true, oneofs: true };
  const loaded = loadPackageDefinition(loadSync(PROTO, options)) as unknown as {
    kvjax: { v1: { RuntimeService: ServiceClientConstructor } };
  };
  return loaded.kvjax.v1.RuntimeService;
}

/** The service's client, with a method for each call. */
export type RuntimeClient = GrpcClient & Record<string, (...args: unknown[]) => unknown>;
