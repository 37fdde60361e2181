/**
 * Chat templates, for applications that want them: the server knows none. Source: ADR 0008, sections 1.2 and 3.4.
 *
 * A template may render an earlier turn otherwise than it was generated. Qwen3's, with enable_thinking false, leaves the empty think block
 * out that it prompted with. So `tokensForChat` renders only what is new. See kvjax.client.templates.
 */

/** One message of a conversation. */
export interface Message {
  role: string;
  content: string;
}

/** What the helpers need of a tokenizer. `loadTokenizer` of "kvjax-client/tokenizer" makes one. */
export interface ChatTokenizer {
  /** Token ids of a text, without special tokens around it. */
  encode(text: string): number[];
  /** The text of messages. options: variables of the template, such as enable_thinking. */
  render(messages: readonly Message[], generationPrompt: boolean, options: Record<string, unknown>): string;
  /** The text of the end-of-sequence token. */
  readonly eosToken: string;
}

/** Token ids of a whole conversation, up to where the assistant's answer begins: for `createSession`. */
export function fromOpenAIMessages(messages: readonly Message[], tokenizer: ChatTokenizer, options: Record<string, unknown> = {}): number[] {
  return tokenizer.encode(tokenizer.render(messages, true, options));
}

/**
 * Token ids of the messages that come after those of `after`, up to where the assistant's answer begins: for `append`.
 *
 * after: what the session holds, at last the model's own answer. stopped: whether that answer ended with the end-of-sequence token; false:
 * it ended by its length. Throws if the template renders earlier messages otherwise once later ones follow.
 */
export function tokensForChat(
  messages: readonly Message[],
  tokenizer: ChatTokenizer,
  { after = [], stopped = true, ...options }: { after?: readonly Message[]; stopped?: boolean; [option: string]: unknown } = {},
): number[] {
  const last = after.at(-1);
  if (!last) return fromOpenAIMessages(messages, tokenizer, options);
  const before = tokenizer.render(after, false, options);
  const both = tokenizer.render([...after, ...messages], true, options);
  if (!both.startsWith(before)) {
    throw new Error(
      "the chat template renders earlier messages otherwise once later ones follow, so it cannot be used turn by turn: " +
        "write the turns yourself, as token ids",
    );
  }
  let end = before.slice(before.lastIndexOf(last.content) + last.content.length);
  if (stopped && end.startsWith(tokenizer.eosToken)) end = end.slice(tokenizer.eosToken.length);
  return tokenizer.encode(end + both.slice(before.length));
}
