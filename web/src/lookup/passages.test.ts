import { describe, expect, it } from "vitest";
import { cutPassages } from "./passages";

const cut = (text: string, characters?: number) =>
  cutPassages("a.md", text, characters).map(({ line, text }) => [line, text]);

describe("passages", () => {
  it("keep paragraphs together as far as they fit, with the lines where they begin", () => {
    expect(cut("one\n\ntwo\nstill two\n\n\nthree", 20)).toEqual([
      [1, "one\n\ntwo\nstill two"],
      [7, "three"],
    ]);
    expect(cut("\n\n  \n first")).toEqual([[4, "first"]]);
    expect(cut("one\r\n\r\ntwo\r\n")).toEqual([[1, "one\n\ntwo"]]);
  });

  it("begin at each heading", () => {
    expect(cut("# A\ntext\n## B\nmore\n#no heading")).toEqual([
      [1, "# A\ntext"],
      [3, "## B\nmore\n#no heading"],
    ]);
  });

  it("cut what is too long after a sentence or a line, else after a word, else anywhere but within a character", () => {
    expect(cut("It is so. And then it is longer", 20)).toEqual([
      [1, "It is so."],
      [1, "And then it is"],
      [1, "longer"],
    ]);
    expect(cut("line one is here\nline two is here", 20)).toEqual([
      [1, "line one is here"],
      [2, "line two is here"],
    ]);
    expect(cut("a".repeat(25), 10).map(([, text]) => text)).toEqual(["a".repeat(10), "a".repeat(10), "a".repeat(5)]);
    expect(cut("🙂".repeat(4), 3).map(([, text]) => text)).toEqual(["🙂", "🙂", "🙂", "🙂"]);
  });

  it("are none of an empty file", () => {
    expect(cut("")).toEqual([]);
    expect(cut(" \n\n\t\n")).toEqual([]);
  });
});
