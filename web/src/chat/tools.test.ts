import { describe, expect, it } from "vitest";
import { answerBuiltIn, BUILT_IN_TOOLS, readScript } from "./builtInTools";
import { calculate } from "./calculate";
import { addMcpTools, labelServer } from "./mcp";
import { readTools } from "./settings";
import { checkName, readForm, writeForm } from "./toolForm";
import { DEFAULT_SETTINGS } from "./types";

describe("calculate", () => {
  it.each([
    ["1 + 2 * 3", 7],
    ["2 * (3 + sqrt(16))^2", 98],
    ["-2^2", -4],
    ["2^3^2", 512],
    ["2 ** -1", 0.5],
    ["10 % 4 - .5", 1.5],
    ["max(1, 5, 3) / 2e1", 0.25],
    ["cos(PI)", -1],
  ])("%s is %d", (text, value) => expect(calculate(text)).toBeCloseTo(value, 12));

  it.each(["", "1 +", "(1", "1 2", "x", "alert(1)", "constructor(1)", "1;2", "(".repeat(10_000)])(
    "%s is told to be wrong",
    (text) => expect(() => calculate(text)).toThrow(/“|nested/),
  );
});

describe("built-in tools", () => {
  const tools = JSON.stringify(BUILT_IN_TOOLS.map((tool) => tool.definition));
  const call = (name: string, args: string) => ({ id: "", name, arguments: args });

  it("answer what they are there for, and tell the model what was wrong", () => {
    expect(answerBuiltIn(call("calculate", '{"expression": "6 * 7"}'), tools)).toBe("42");
    expect(answerBuiltIn(call("calculate", "{"), tools)).toMatch(/^Error: /);
    expect(JSON.parse(answerBuiltIn(call("get_time", ""), tools) ?? "").utc).toMatch(/^\d{4}-/);
  });

  it("leave programs to the person, and know them from others of the name", () => {
    const script = call("run_javascript", '{"code": "6 * 7"}');
    expect(answerBuiltIn(script, tools)).toBeNull();
    expect(readScript(script, tools)).toBe("6 * 7");
    expect(readScript(script, '[{"name": "run_javascript"}]')).toBeNull();
    expect(readScript(call("run_javascript", '{"code": 7}'), tools)).toBeNull();
    expect(readScript(call("calculate", '{"code": "7"}'), tools)).toBeNull();
  });

  it("leave tools alone that only have their names", () => {
    expect(answerBuiltIn(call("calculate", "{}"), '[{"name": "calculate"}]')).toBeNull();
    expect(answerBuiltIn(call("other", "{}"), tools)).toBeNull();
  });
});

describe("the form of a tool", () => {
  const form = {
    name: "look",
    description: "Looks",
    parameters: [{ name: "at", type: "string", description: "", required: true }],
  } as const;

  it("writes what it reads", () => expect(readForm(writeForm(form))).toEqual(form));

  it("leaves to JSON what it cannot say", () => {
    const parameters = { type: "object", properties: { at: { type: "string", enum: ["a"] } } };
    expect(readForm({ type: "function", function: { name: "look", parameters } })).toBeNull();
  });

  it("takes names that servers take", () => {
    expect(checkName("get weather", [])).toContain("no space");
    expect(checkName("look", ["look"])).toContain("of this name");
    expect(checkName("look", [])).toBeNull();
  });
});

it("gives tools of MCP servers names of their own, and asks about each", () => {
  const tool = (name: string) => ({ name, description: "d", parameters: { type: "object" } });
  const first = addMcpTools(DEFAULT_SETTINGS, "files", [tool("read"), tool("a.b/c")]);
  const both = { ...DEFAULT_SETTINGS, ...first };
  const second = { ...both, ...addMcpTools(both, "http://127.0.0.1:9000/mcp", [tool("read"), tool("read")]) };
  expect(Object.keys(second.toolServers)).toEqual(["read", "a_b_c", "127_0_0_1_9000_read"]);
  expect(second.toolServers.a_b_c).toEqual({ server: "files", tool: "a.b/c", allowed: false });
  expect(Object.values(second.toolServers).some((one) => one.allowed)).toBe(false);
  expect(readTools(second.tools)).toHaveLength(3);
  expect(addMcpTools(second, "files", [tool("read")]).tools).toBe(second.tools);
  expect(labelServer("http://127.0.0.1:9000/mcp")).toBe("127.0.0.1:9000");
});
