import { getJson } from "../api/client";
import { isDemo } from "../api/models";
import { savedStore } from "../lib/saved";
import { findConversation, proposeTitle } from "./library";
import { DEFAULT_SETTINGS, type Message, type UserMessage } from "./types";
import { writeRequest } from "./wire";

export type Titles = "model" | "words";

/** Who names a conversation that begins with a long message. */
export const titles = savedStore<Titles>(
  "titles",
  "model",
  (value): value is Titles => value === "model" || value === "words",
);

/** A first message that is not longer is a good title itself. */
const LONG = 60;
const MOST_CHARACTERS = 80;
const MOST_TOKENS = 24;
/** What people wait for is computed first. */
const LATER = -10;
const ASK = "Give this conversation a title of at most six words, in its language. Answer with the title alone.";

/** Have the model that answered a first message name the conversation; where it has no title, the first words stay. */
export async function nameConversation(path: readonly Message[], model: string): Promise<void> {
  const first = path[0];
  const conversation = first && findConversation(first.conversation);
  if (first?.role !== "user" || !conversation || conversation.named || titles.get() !== "model") return;
  const { settings } = conversation;
  const isShort = first.content.trim() !== "" && first.content.trim().length <= LONG;
  if (isShort || settings.asText || isDemo((model || settings.model).replace(/:latest$/, ""))) return;
  const question: UserMessage = { ...first, id: "title", files: [], pictures: [], passages: [], content: ASK };
  // Tools stand at the beginning of a prompt: without them nothing of it would come from the cache.
  const { model: chosen, system, tools } = settings;
  const plain = { ...DEFAULT_SETTINGS, model: chosen, system, tools, toolChoice: "none" as const };
  const asked = { ...plain, temperature: 0, maxTokens: MOST_TOKENS, reasoning: "none" as const };
  try {
    const body = { ...writeRequest([...path, question], asked, 0, false), priority: LATER };
    const reply = await getJson<Reply>("/v1/chat/completions", { body });
    const title = readTitle(reply.choices[0]?.message.content ?? "");
    if (title) proposeTitle(conversation.id, title);
  } catch {
    // It has a title: its first words.
  }
}

interface Reply {
  choices: { message: { content: string | null } }[];
}

/** The title in an answer, without what models put around one; null where it is none. */
export function readTitle(answer: string): string | null {
  const line = answer.split("\n").find((one) => one.trim() !== "") ?? "";
  const title = line
    .replace(/^[\s#*"“”„«»'`]*(?:title\s*:)?[\s*"“”„«»'`]*/i, "")
    .replace(/[\s*"“”„«»'`]*\.?[\s*"“”„«»'`]*$/, "")
    .replace(/\s+/g, " ");
  return title.length > 1 && title.length <= MOST_CHARACTERS ? title : null;
}
