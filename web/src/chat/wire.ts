import type { ChatBody, WireMessage, WirePart } from "../api/chat";
import type { Sampling } from "../api/sampling";
import { quotePassages } from "../lookup/quote";
import { writeSettings } from "./settings";
import { fence } from "./transfer";
import type { Message, Settings } from "./types";

/** The request that asks for the message behind a path; with `continues`, for more of the path's last message. */
export function writeRequest(
  path: readonly Message[],
  settings: Settings,
  seed: number,
  continues: boolean,
  usual: Sampling = {},
): ChatBody {
  const system: WireMessage[] = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  const body: ChatBody = { ...writeSettings(settings, seed, usual), messages: [...system, ...path.map(writeMessage)] };
  if (!continues) return body;
  // An answer that goes on can neither be made to follow a schema nor to call a tool.
  const { response_format: _, tool_choice: choice, ...rest } = body;
  return { ...rest, ...(choice === "none" && { tool_choice: choice }), messages: body.messages };
}

/** The request that has the model continue the texts of a path, one after another, without a chat template. */
export function writeTextRequest(
  path: readonly Message[],
  settings: Settings,
  seed: number,
  usual: Sampling = {},
): Record<string, unknown> {
  const {
    tools: _,
    tool_choice: _choice,
    response_format: _format,
    reasoning_effort: _effort,
    ...rest
  } = writeSettings(settings, seed, usual);
  const texts = path.map((message) => (message.role === "user" ? joinFiles(message) : message.content));
  const prompt = [settings.system.trim(), ...texts].filter(Boolean).join("\n\n");
  return { max_tokens: TEXT_TOKENS, ...rest, logprobs: undefined, top_logprobs: undefined, prompt };
}

/** A text without a template has no end of its own. */
const TEXT_TOKENS = 400;

function writeMessage(message: Message): WireMessage {
  if (message.role === "user") return { role: "user", content: writeParts(message) };
  if (message.role === "tool")
    return { role: "tool", content: message.content, tool_call_id: message.callId, name: message.name };
  const calls = message.calls?.map((call) => ({
    id: call.id,
    type: "function" as const,
    function: { name: call.name, arguments: call.arguments },
  }));
  return {
    role: "assistant",
    content: message.content,
    ...(message.reasoning && { reasoning_content: message.reasoning }),
    ...(calls?.length && { tool_calls: calls }),
  };
}

/** A message's pictures and scans before its text; without any, the text alone. */
function writeParts(message: Message & { role: "user" }): string | WirePart[] {
  const text = joinFiles(message);
  const pictures = message.pictures?.map(({ url }): WirePart => ({ type: "image_url", image_url: { url } })) ?? [];
  const scans = (message.files ?? []).flatMap(({ name, url }): WirePart[] =>
    url ? [{ type: "file", file: { filename: name, file_data: url } }] : [],
  );
  const seen = [...pictures, ...scans];
  if (seen.length === 0) return text;
  return text ? [...seen, { type: "text", text }] : seen;
}

/** A message's text with its files before it, each under its name in a code block, and the passages that go along. */
function joinFiles({ content, files, passages }: Message & { role: "user" }): string {
  const texts = (files ?? []).filter(({ url }) => !url);
  const parts = texts.map((file) => `${file.name}:\n${fence(file.text, endingOf(file.name))}`);
  return [...parts, quotePassages(passages ?? [], content)].filter(Boolean).join("\n\n");
}

function endingOf(name: string): string {
  return /\.([a-z0-9]{1,10})$/i.exec(name)?.[1]?.toLowerCase() ?? "";
}
