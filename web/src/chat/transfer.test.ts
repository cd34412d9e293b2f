import { describe, expect, it } from "vitest";
import { makeRandom } from "../lib/random";
import { exportJson, exportMarkdown, fence, importJson, type Whole } from "./transfer";
import { listPath, makeTree } from "./tree";
import { type Conversation, DEFAULT_SETTINGS, type Message, type Settings } from "./types";

const SETTINGS: Settings = {
  ...DEFAULT_SETTINGS,
  system: "Be brief.\nAlways.",
  temperature: 0.5,
  seed: 7,
  tools: "[]",
  toolChoice: "required",
  showTokens: true,
};

const FILES = [
  { name: "a.py", text: "x = 1" },
  { name: "scan.pdf", text: "", url: "data:application/pdf;base64,AAAA" },
];
const PICTURE = { name: "a.png", url: "data:image/png;base64,AAAA", width: 2, height: 1 };
const PASSAGES = [{ path: "notes/a.md", line: 3, text: "<b>Found</b>" }];

function conversation(settings: Settings, leaf: string | null): Conversation {
  return { id: "c", title: "Title", named: true, created: 1, updated: 2, settings, leaf };
}

function randomMessages(random: () => number): Message[] {
  const messages: Message[] = [];
  for (let index = 0; index < 1 + random() * 30; index++) {
    const parent = messages[Math.floor(random() * messages.length)]?.id ?? null;
    const common = { id: `m${index}`, conversation: "c", parent, created: index, content: `Text ${random()} \`\`\`` };
    const dice = random();
    if (dice < 0.4) messages.push({ ...common, role: "user", files: FILES, pictures: [PICTURE], passages: PASSAGES });
    else if (dice < 0.5) messages.push({ ...common, role: "tool", callId: "call_1", name: "look" });
    else
      messages.push({
        ...common,
        role: "assistant",
        status: "stopped",
        model: "demo",
        seed: 5,
        reasoning: "hm",
        reasoningMs: 12,
        calls: [{ id: "call_1", name: "look", arguments: "{}" }],
        tokens: [{ text: "a", logprob: -1, at: 0, top: [{ text: "\ufffd", bytes: [200], logprob: -3 }] }],
        stats: {
          firstTokenMs: 3,
          tokensPerSecond: null,
          promptTokens: 9,
          cachedTokens: 0,
          answerTokens: 2,
          queueMs: 0,
        },
        error: "lost",
      });
  }
  return messages;
}

/** A conversation without its ids: the path to each message by content. */
function withoutIds({ conversation: { id: _, leaf, ...rest }, messages }: Whole) {
  const tree = makeTree(messages, leaf);
  const way = (id: string | null) => listPath(tree, id).map((message) => message.content);
  const bare = messages.map(({ id, parent: _parent, conversation: _conversation, ...message }) => ({
    ...message,
    way: way(id),
  }));
  return { ...rest, leaf: way(leaf), messages: bare };
}

it("imports what was exported, under new ids", () => {
  for (let seed = 0; seed < 40; seed++) {
    const random = makeRandom(seed);
    const messages = randomMessages(random);
    const whole = { conversation: conversation(SETTINGS, messages.at(-1)?.id ?? null), messages };
    const [again] = importJson(exportJson([whole]));
    expect(again && withoutIds(again), `seed ${seed}`).toEqual(withoutIds(whole));
    expect(again?.conversation.id).not.toBe("c");
    const known = new Set(messages.map(({ id }) => id));
    expect(again?.messages.some(({ id }) => known.has(id))).toBe(false);
  }
});

describe("import", () => {
  it("takes no address from a file: the person allows each one", () => {
    const settings = { ...SETTINGS, toolUrls: { look: { url: "http://evil.example", automatic: true } } };
    const [again] = importJson(exportJson([{ conversation: conversation(settings, null), messages: [] }]));
    expect(again?.conversation.settings.toolUrls).toEqual({});
  });

  it("takes no picture that would be fetched, or that is a document", () => {
    const urls = ["http://evil.example/a.png", "data:image/svg+xml;base64,AAAA", "data:text/html,x", PICTURE.url];
    const common = { id: "m", conversation: "c", parent: null, created: 0, content: "", role: "user" as const };
    const messages = [{ ...common, pictures: urls.map((url) => ({ ...PICTURE, url })) }];
    const [again] = importJson(exportJson([{ conversation: conversation(SETTINGS, "m"), messages }]));
    expect(again?.messages[0]).toMatchObject({ pictures: [PICTURE] });
  });

  it("says what is wrong with a file", () => {
    expect(() => importJson("{")).toThrow("is not JSON");
    expect(() => importJson("[]")).toThrow("no conversations");
    expect(() => importJson('{"format":"mlxr-conversations","version":2,"conversations":[]}')).toThrow("version 2");
    const broken = (message: unknown) =>
      JSON.stringify({ format: "mlxr-conversations", version: 1, conversations: [{ messages: [message] }] });
    expect(() => importJson(broken({ id: "x" }))).toThrow("Conversation 1, message 1, of the file is broken");
    expect(() => importJson(broken({ id: "x", content: "", role: "robot" }))).toThrow("robot");
    expect(() => importJson(broken(null))).toThrow("broken");
  });

  it("takes an answer that was growing for one that broke off", () => {
    const file = `{"format":"mlxr-conversations","version":1,"conversations":[{"messages":[
      {"id":"x","parent":null,"content":"a","role":"assistant","status":"growing"}]}]}`;
    expect(importJson(file)[0]?.messages[0]).toMatchObject({ status: "interrupted", content: "a" });
  });
});

it("writes the shown branch as Markdown", () => {
  const common = { conversation: "c", created: 0 };
  const messages: Message[] = [
    {
      ...common,
      id: "q",
      parent: null,
      role: "user",
      content: "Why?",
      files: [{ name: "a.md", text: "```\nx\n```" }],
      pictures: [PICTURE],
      passages: PASSAGES,
    },
    { ...common, id: "a1", parent: "q", role: "assistant", status: "done", model: "demo", content: "Other" },
    { ...common, id: "a2", parent: "q", role: "assistant", status: "done", model: "demo", content: "Because." },
  ];
  expect(exportMarkdown({ conversation: conversation(SETTINGS, "a2"), messages })).toBe(
    "# Title\n\n> Be brief.\n> Always.\n\n## You\n\n**a.png** (a picture)\n\nWhy?\n\n**a.md**\n\n````\n```\nx\n```\n````\n\n**[1] notes/a.md:3**\n\n```\n<b>Found</b>\n```\n\n## demo\n\nBecause.\n",
  );
  expect(fence("plain", "py")).toBe("```py\nplain\n```");
});
