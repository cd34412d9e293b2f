import { describe, expect, it } from "vitest";
import { boundTokens, estimateTokens, fuse, MOST_QUOTED, rank, scoreVectors, takeBest } from "./ranking";

const passage = (text: string, path = "a.md") => ({ path, line: 1, text });

describe("a ranking", () => {
  it("has the nearest vectors first, and equal ones in their order", () => {
    const vectors = [
      [0, 1],
      [1, 0],
      [0.6, 0.8],
      [1, 0],
    ].map((numbers) => Float32Array.from(numbers));
    const scores = scoreVectors(vectors, Float32Array.from([1, 0]));
    expect(rank(scores, 3)).toEqual([1, 3, 2]);
    expect(rank(scores, 9, 0)).toEqual([1, 3, 2]);
  });

  it("joins others by their places", () => {
    expect(fuse([["a", "b", "c"]])).toEqual(["a", "b", "c"]);
    expect(
      fuse([
        ["a", "b"],
        ["c", "b"],
      ]),
    ).toEqual(["b", "a", "c"]);
    expect(fuse([])).toEqual([]);
  });
});

describe("the passages that go along", () => {
  it("take a quarter of the context, and half of what is left of it", () => {
    expect(boundTokens(8000, 0)).toBe(2000);
    expect(boundTokens(8000, 7000)).toBe(500);
    expect(boundTokens(8000, 9000)).toBe(0);
    expect(boundTokens(null, 0)).toBe(1024);
  });

  it("are counted by letters, of which some are tokens of their own", () => {
    expect(estimateTokens("abcdef")).toBe(2);
    expect(estimateTokens("東京")).toBe(2);
    expect(estimateTokens("🙂")).toBe(1);
  });

  it("are the best that fit, at least one", () => {
    const long = [passage("x".repeat(600)), passage("y".repeat(600)), passage("z")];
    expect(takeBest(long, 300)).toEqual(long.slice(0, 1));
    expect(takeBest(long, 0)).toEqual(long.slice(0, 1));
    expect(takeBest(long, 500)).toEqual(long);
    expect(takeBest([], 500)).toEqual([]);
  });

  it("are a few, each text once", () => {
    const many = Array.from({ length: 20 }, (_, index) => passage(`text ${index}`));
    expect(takeBest(many, 9000)).toHaveLength(MOST_QUOTED);
    expect(takeBest([passage("same"), passage("same", "b.md"), passage("other")], 900).map(({ text }) => text)).toEqual(
      ["same", "other"],
    );
  });
});
