import { expect, it } from "vitest";
import { formatBytes, formatCount, formatRate, formatSeconds } from "./format";

it("writes bytes in the unit people read", () => {
  expect([0, 1023, 1536, 10 * 1024 ** 2, 5.22 * 1024 ** 3, -1, Number.NaN].map(formatBytes)).toEqual([
    "0 B",
    "1,023 B",
    "1.5 KiB",
    "10 MiB",
    "5.2 GiB",
    "–",
    "–",
  ]);
});

it("writes durations without a unit that says nothing", () => {
  expect([0.0004, 0.4, 0.9999, 12.34, 59.99, 83, 3661, 7200].map(formatSeconds)).toEqual([
    "0 ms",
    "400 ms",
    "1.0 s",
    "12.3 s",
    "1 min",
    "1 min 23 s",
    "1 h 1 min",
    "2 h",
  ]);
});

it("writes counts and rates", () => {
  expect(formatCount(12345)).toBe("12,345");
  expect(formatRate(55.51)).toBe("55.5 tokens/s");
  expect(formatRate(2510)).toBe("2,510 tokens/s");
});
