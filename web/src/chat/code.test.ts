import { expect, it } from "vitest";
import { cutPictures, writeCode } from "./code";

const BODY = { messages: [{ role: "user" as const, content: "What's up?" }], top_k: 40, stream: false, stop: null };

it("quotes for the shell", () => {
  const code = writeCode("curl", BODY, "http://here", true);
  expect(code).toContain("curl http://here/v1/chat/completions \\\n");
  expect(code).toContain("What'\\''s up?");
  expect(code).toContain('-H "Authorization: Bearer $MLXR_API_KEY"');
});

it("spells values as Python does, and what the client does not know apart", () => {
  const code = writeCode("python", BODY, "http://here", false);
  expect(code).toContain('client = OpenAI(base_url="http://here/v1", api_key="none")');
  expect(code).toContain("    stream=False,\n    stop=None,");
  expect(code).toContain('    extra_body={\n        "top_k": 40,\n    },');
});

it("sends pictures, which no command line takes, through stdin, and shows their beginnings", () => {
  const url = `data:image/png;base64,${"A+/x".repeat(20_000)}==`;
  const content = [{ type: "image_url" as const, image_url: { url } }];
  const code = writeCode("curl", { messages: [{ role: "user", content }] }, "http://here", false);
  expect(code).toMatch(/-d @- <<'END'\n\{[\s\S]*\n\}\nEND$/);
  expect(code).toContain(url);
  expect(cutPictures(code).length).toBeLessThan(400);
  expect(cutPictures(code)).toContain(`"${url.slice(0, 62)}…"`);
});

it("is a program of JavaScript", () => {
  expect(
    () => new Function(`return async () => { ${writeCode("javascript", BODY, "http://here", true)} }`),
  ).not.toThrow();
});
