/** A tokenizer from a model's folder: opt-in, needs @huggingface/tokenizers, and @huggingface/jinja for chat templates. */

import { Template } from "@huggingface/jinja";
import { Tokenizer } from "@huggingface/tokenizers";
import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";

import type { ChatTokenizer, Message } from "./templates.js";

/** A tokenizer that also turns tokens into text. */
export interface TextTokenizer extends ChatTokenizer {
  /** The text of tokens, without special ones. */
  decode(tokenIds: readonly number[]): string;
}

/** The tokenizer of a folder with tokenizer.json, tokenizer_config.json and, for messages, a chat template. */
export function loadTokenizer(folder: string): TextTokenizer {
  const read = (name: string) => JSON.parse(readFileSync(join(folder, name), "utf8"));
  const config = read("tokenizer_config.json");
  const inner = new Tokenizer(read("tokenizer.json"), config);
  const file = join(folder, "chat_template.jinja");
  const template: string | undefined = existsSync(file) ? readFileSync(file, "utf8") : config.chat_template;
  const textOf = (token: string | { content: string } | null | undefined) => (typeof token === "object" ? token?.content : token) ?? "";
  const special = { bos_token: textOf(config.bos_token), eos_token: textOf(config.eos_token) };
  return {
    eosToken: special.eos_token,
    encode: (text) => inner.encode(text, { add_special_tokens: false }).ids,
    decode: (tokenIds) => (tokenIds.length ? inner.decode([...tokenIds], { skip_special_tokens: true }) : ""),
    render(messages: readonly Message[], generationPrompt: boolean, options: Record<string, unknown>): string {
      if (template === undefined) throw new Error(`${folder} has no chat template: give token ids`);
      return new Template(template).render({ messages, add_generation_prompt: generationPrompt, ...special, ...options });
    },
  };
}
