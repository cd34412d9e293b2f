import { expect, it } from "vitest";
import { SseParser } from "./sse";

const TEXT =
  ': comment\r\ndata: {"a":1}\r\n\r\nevent: step\ndata: one\ndata: two\n\nid: 7\ndata:  kept space\n\nevent: empty\n\ndata: [DONE]\n\n';
const EVENTS = [
  { event: "message", data: '{"a":1}' },
  { event: "step", data: "one\ntwo" },
  { event: "message", data: " kept space" },
  { event: "message", data: "[DONE]" },
];

it("gives the same events however the text is cut", () => {
  for (let size = 1; size <= TEXT.length; size++) {
    const parser = new SseParser();
    const events = [];
    for (let at = 0; at < TEXT.length; at += size) events.push(...parser.push(TEXT.slice(at, at + size)));
    expect(events, `pieces of ${size}`).toEqual(EVENTS);
  }
});

it("keeps an event that is not complete", () => {
  const parser = new SseParser();
  expect(parser.push("data: half")).toEqual([]);
  expect(parser.push("\n\n")).toEqual([{ event: "message", data: "half" }]);
});
