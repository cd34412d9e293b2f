import { describe, expect, it } from "vitest";
import { NUMBERS, readNumber, readSchema, readSettings, readTools, writeSettings } from "./settings";
import { DEFAULT_SETTINGS, type Message } from "./types";
import { writeRequest } from "./wire";

const PICTURE = { name: "a.png", url: "data:image/png;base64,AAAA", width: 2, height: 1 };
const TOOL = { type: "function", function: { name: "look", parameters: { type: "object" } } };

describe("what a person types", () => {
  const [temperature, , topK] = NUMBERS;
  it("is a number, nothing, or told to be wrong", () => {
    if (!temperature || !topK) throw new Error("no fields");
    expect(readNumber("", temperature)).toBeNull();
    expect(readNumber(" 0,7 ", temperature)).toBe(0.7);
    expect(readNumber("hot", temperature)).toBe("Temperature is a number.");
    expect(readNumber("9", temperature)).toBe("Temperature lies between 0 and 5.");
    expect(readNumber("1.5", topK)).toBe("Top k is a whole number.");
  });

  it("is a list of tools, with or without OpenAI's wrapping", () => {
    expect(readTools(" ")).toEqual([]);
    expect(readTools(JSON.stringify([TOOL]))).toEqual([TOOL]);
    expect(readTools(JSON.stringify([TOOL.function]))).toEqual([TOOL]);
    expect(readTools("{}")).toContain("list");
    expect(readTools("[1]")).toContain("Tool 1 has no name");
    expect(readTools(JSON.stringify([TOOL, TOOL]))).toContain("two tools called “look”");
    expect(readTools("[")).toContain("not JSON");
  });

  it("is a schema", () => {
    expect(readSchema("")).toBeNull();
    expect(readSchema('{"type":"object"}')).toEqual({ type: "object" });
    expect(readSchema("[]")).toContain("object");
  });
});

describe("a request", () => {
  it("carries what was set, and nothing else", () => {
    expect(writeSettings(DEFAULT_SETTINGS, 5)).toEqual({ seed: 5 });
    const settings = {
      ...DEFAULT_SETTINGS,
      model: "m",
      temperature: 0,
      topP: 0.9,
      maxTokens: 10,
      stop: "END\n\n###",
      reasoning: "none" as const,
      tools: JSON.stringify([TOOL]),
      schema: '{"type":"object"}',
      showTokens: true,
    };
    expect(writeSettings(settings, 5)).toEqual({
      model: "m",
      temperature: 0,
      top_p: 0.9,
      max_tokens: 10,
      seed: 5,
      stop: ["END", "###"],
      reasoning_effort: "none",
      tools: [TOOL],
      tool_choice: "auto",
      response_format: { type: "json_schema", json_schema: { name: "answer", schema: { type: "object" } } },
      logprobs: true,
      top_logprobs: 8,
    });
    expect(() => writeSettings({ ...DEFAULT_SETTINGS, tools: "[" }, 1)).toThrow("tools of this conversation");
  });

  it("tells the conversation with files, calls and results", () => {
    const common = { conversation: "c", created: 0, parent: null };
    const path: Message[] = [
      { ...common, id: "1", role: "user", content: "Look", files: [{ name: "a.py", text: "x" }], pictures: [PICTURE] },
      {
        ...common,
        id: "2",
        role: "assistant",
        status: "done",
        model: "",
        content: "",
        reasoning: "hm",
        calls: [{ id: "call_1", name: "look", arguments: "{}" }],
      },
      { ...common, id: "3", role: "tool", callId: "call_1", name: "look", content: "seen" },
    ];
    expect(writeRequest(path, { ...DEFAULT_SETTINGS, system: "Be brief." }, 1, false).messages).toEqual([
      { role: "system", content: "Be brief." },
      {
        role: "user",
        content: [
          { type: "image_url", image_url: { url: PICTURE.url } },
          { type: "text", text: "a.py:\n```py\nx\n```\n\nLook" },
        ],
      },
      {
        role: "assistant",
        content: "",
        reasoning_content: "hm",
        tool_calls: [{ id: "call_1", type: "function", function: { name: "look", arguments: "{}" } }],
      },
      { role: "tool", content: "seen", tool_call_id: "call_1", name: "look" },
    ]);
  });

  it("has no text where there is only a picture or a scan", () => {
    const message: Message = { id: "1", conversation: "c", created: 0, parent: null, role: "user", content: "" };
    expect(writeRequest([{ ...message, pictures: [PICTURE] }], DEFAULT_SETTINGS, 1, false).messages).toEqual([
      { role: "user", content: [{ type: "image_url", image_url: { url: PICTURE.url } }] },
    ]);
    const url = "data:application/pdf;base64,AAAA";
    const scanned = { ...message, files: [{ name: "scan.pdf", text: "", url }] };
    expect(writeRequest([scanned], DEFAULT_SETTINGS, 1, false).messages).toEqual([
      { role: "user", content: [{ type: "file", file: { filename: "scan.pdf", file_data: url } }] },
    ]);
    expect(writeRequest([{ ...message, pictures: [] }], DEFAULT_SETTINGS, 1, false).messages[0]?.content).toBe("");
  });

  it("that continues an answer asks for no schema and no call", () => {
    const settings = {
      ...DEFAULT_SETTINGS,
      schema: "{}",
      tools: JSON.stringify([TOOL]),
      toolChoice: "required" as const,
    };
    const body = writeRequest([], settings, 1, true);
    expect(body.response_format).toBeUndefined();
    expect(body.tool_choice).toBeUndefined();
    expect(body.tools).toEqual([TOOL]);
  });
});

it("reads settings of any origin", () => {
  expect(readSettings(null)).toEqual(DEFAULT_SETTINGS);
  const toolServers = { a: { server: "files", tool: "a", allowed: true } };
  const toolUrls = { a: { url: "http://x" } };
  const given = {
    system: "x",
    topK: 5,
    seed: "7",
    reasoning: "deep",
    toolUrls,
    toolServers,
    runsScripts: true,
    other: 1,
  };
  expect(readSettings(given)).toEqual({ ...DEFAULT_SETTINGS, system: "x", topK: 5 });
});
