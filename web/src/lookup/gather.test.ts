import { describe, expect, it } from "vitest";
import { chooseFiles, decodeText, describeLeftOut, type Limits, readChosen } from "./gather";

const LIMITS: Limits = { files: 3, bytes: 100, textBytes: 50, pdfBytes: 80 };

function find(path: string, size = 1) {
  return { path, file: new File(["x".repeat(size)], path.split("/").at(-1) ?? "") };
}

const choose = (...found: ReturnType<typeof find>[]) => {
  const { chosen, left } = chooseFiles(found, LIMITS);
  return { chosen: chosen.map(({ path }) => path), left: Object.fromEntries(left) };
};

describe("a folder's files", () => {
  it("are read in order, without hidden ones, packages and what is no text", () => {
    const { chosen, left } = choose(
      find("n/b.md"),
      find("n/a"),
      find("n/.env"),
      find("n/.git/config"),
      find("n/sub/node_modules/x/readme.md"),
      find("n/picture.PNG"),
      find("n/sub/c.pdf"),
    );
    expect(chosen).toEqual(["n/a", "n/b.md", "n/sub/c.pdf"]);
    expect(left).toEqual({
      "hidden, or in a folder such as node_modules": ["n/.env", "n/.git/config", "n/sub/node_modules/x/readme.md"],
      "no text": ["n/picture.PNG"],
    });
  });

  it("may lie in a hidden folder that was chosen itself", () => {
    expect(choose(find(".notes/a.md")).chosen).toEqual([".notes/a.md"]);
    expect(choose(find("big.txt")).chosen).toEqual(["big.txt"]);
  });

  it("have bounds: each, their number, and all together", () => {
    expect(choose(find("n/a.md", 51), find("n/b.pdf", 80)).left).toEqual({ "larger than 50 B": ["n/a.md"] });
    expect(choose(...["a", "b", "c", "d"].map((name) => find(`n/${name}`))).left).toEqual({
      "beyond the 3 files that a folder may have": ["n/d"],
    });
    const full = choose(find("n/a", 50), find("n/b", 50), find("n/c", 1));
    expect(full).toEqual({ chosen: ["n/a", "n/b"], left: { "beyond the 100 B that a folder may have": ["n/c"] } });
  });

  it("are told where they are left out, a sentence for each reason", () => {
    const left = new Map([
      ["no text", ["a.png"]],
      ["hidden", ["1", "2", "3", "4", "5"]],
    ]);
    expect(describeLeftOut(left)).toEqual([
      "Left out: “a.png” (no text).",
      "Left out: “1”, “2”, “3” and 2 more (hidden).",
    ]);
    expect(describeLeftOut(new Map())).toEqual([]);
  });

  it("have the paths that the browser gives them", () => {
    const file = new File(["x"], "a.md");
    Object.defineProperty(file, "webkitRelativePath", { value: "n/a.md" });
    expect(readChosen([file, new File(["x"], "b.md")]).map(({ path }) => path)).toEqual(["n/a.md", "b.md"]);
  });
});

it("reads UTF-8 with or without a mark, and no bytes of other kinds", () => {
  const decode = (...bytes: number[]) => decodeText(Uint8Array.from(bytes).buffer);
  expect(decode(0xef, 0xbb, 0xbf, 0x68, 0xc3, 0xa9)).toBe("hé");
  expect(decode(0x68, 0xff)).toBeNull();
  expect(decode(0x68, 0)).toBeNull();
});
