import { describe, expect, it } from "vitest";
import { closeOpen, mayHaveMath, splitBlocks, unifyMath } from "./markdownBlocks";

const TEXT = `# Title
Some *text*
goes on.

- one

  more of one
- two
  \`\`\`sh
  ls

  pwd
  \`\`\`

After the list.
\`\`\`python
def f():

    return "\`\`"
\`\`\`
| a | b |
|---|---|
| 1 | 2 |

1. first

2. second

$$
x^2

+ y
$$

\\[ a + b \\]

> quote
> - with a list
`;

function describeBlocks(text: string): string[] {
  return splitBlocks(text).map((block) =>
    block.kind === "code" ? `code ${block.language}: ${block.code}` : `${block.kind}: ${block.text}`,
  );
}

describe("splitBlocks", () => {
  it("cuts at the top level only", () => {
    expect(describeBlocks(TEXT)).toEqual([
      "text: # Title\nSome *text*\ngoes on.",
      "text: - one\n\n  more of one\n- two\n  ```sh\n  ls\n\n  pwd\n  ```",
      "text: After the list.",
      'code python: def f():\n\n    return "``"',
      "text: | a | b |\n|---|---|\n| 1 | 2 |",
      "text: 1. first\n\n2. second",
      "math: $$\nx^2\n\n+ y\n$$",
      "math: \\[ a + b \\]",
      "text: > quote\n> - with a list",
    ]);
  });

  it("leaves finished blocks as they are while the text grows", () => {
    let before: string[] = [];
    for (let size = 1; size <= TEXT.length; size++) {
      const now = describeBlocks(TEXT.slice(0, size));
      const stable = before.slice(0, Math.max(0, Math.min(before.length, now.length) - 2));
      expect(now.slice(0, stable.length), `after ${size} characters`).toEqual(stable);
      before = now;
    }
  });

  it("keeps all text in its order", () => {
    const plain = (text: string) => text.replace(/[\s`]|python/g, "");
    const joined = splitBlocks(TEXT).map((block) => (block.kind === "code" ? block.code : block.text));
    expect(plain(joined.join("\n"))).toBe(plain(TEXT));
  });

  it("cuts long lists between items, so that numbers go on", () => {
    const list = Array.from({ length: 40 }, (_, n) => `${n + 1}. item\n   more\n`).join("\n");
    const blocks = splitBlocks(list);
    expect(blocks.map((block) => block.kind === "text" && block.text.split("\n")[0])).toEqual([
      "1. item",
      "17. item",
      "33. item",
    ]);
  });

  it("says whether code is complete", () => {
    expect(splitBlocks("```js\nlet a")).toEqual([{ kind: "code", language: "js", code: "let a", closed: false }]);
    expect(splitBlocks("~~~~\n~~~\n~~~~")).toEqual([{ kind: "code", language: "", code: "~~~", closed: true }]);
  });

  it("does not tear named links and footnotes apart", () => {
    expect(splitBlocks("See [it][a].\n\n[a]: http://a.example\n\nEnd[^1].\n\n[^1]: Note")).toHaveLength(1);
    expect(splitBlocks("In code:\n\n```\n[a]: b\n```\n\nend")).toHaveLength(3);
  });
});

describe("closeOpen", () => {
  it.each([
    ["a **bold", "a **bold**"],
    ["a **", "a "],
    ["a `cod", "a `cod`"],
    ["a `", "a "],
    ["a ``x`y", "a ``x`y``"],
    ["see [the page](http://exam", "see the page"],
    ["text\n-", "text"],
    ["text\n--", "text"],
    ["text\n2.", "text"],
    ["2 ** 3 ** ", "2 ** 3 ** "],
    ["| a | b", ""],
    ["| a | b |\n|--", ""],
    ["| a | b |\n|---|---|", "| a | b |\n|---|---|"],
    ["plain", "plain"],
  ])("%j is shown as %j", (given, shown) => expect(closeOpen(given)).toBe(shown));
});

describe("unifyMath", () => {
  it.each([
    ["\\(x\\) and $y$", "$$x$$ and $$y$$"],
    ["$5 and $10", "$5 and $10"],
    ["costs $5, not $ 6", "costs $5, not $ 6"],
    ["`$x$` stays", "`$x$` stays"],
    ["$$z$$ stays", "$$z$$ stays"],
    ["$$ z^2 $$", "$$\nz^2\n$$"],
    ["- so\n  $$z$$", "- so\n  $$\n  z\n  $$"],
    ["$$a\n= b$$", "$$\na\n= b\n$$"],
    ["`a`\n$$z$$\nend", "`a`\n$$\nz\n$$\nend"],
    ["`a` $$z$$", "`a` $$z$$"],
  ])("%j becomes %j", (given, unified) => expect(unifyMath(given)).toBe(unified));

  it("is asked for only where there may be some", () => {
    expect(mayHaveMath("no maths (really) [here]")).toBe(false);
    expect(mayHaveMath("\\(x\\)")).toBe(true);
  });
});

it("folds what stands in details, also nested and while it grows", () => {
  const text =
    "Before.\n<details>\n<summary><b>More</b> of it</summary>\n\none\n<details><summary>x</summary>\ntwo\n</details>\n</details>\nAfter.";
  expect(splitBlocks(text)).toEqual([
    { kind: "text", text: "Before." },
    {
      kind: "details",
      summary: "More of it",
      text: "one\n<details><summary>x</summary>\ntwo\n</details>",
      closed: true,
    },
    { kind: "text", text: "After." },
  ]);
  expect(splitBlocks("<details>\nhalf")).toEqual([
    { kind: "details", summary: "Details", text: "half", closed: false },
  ]);
});
