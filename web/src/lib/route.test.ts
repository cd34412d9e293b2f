import { describe, expect, it } from "vitest";
import { parseRoute, routeHref, VIEWS } from "./route";

describe("parseRoute", () => {
  it("reads what routeHref wrote, whatever the detail", () => {
    for (const view of VIEWS)
      for (const detail of ["", "abc", "org/model:q4", "50% off", "a b", "ä/…"])
        expect(parseRoute(routeHref(view, detail))).toEqual({ view, detail });
  });

  it("takes an unknown address for the chat", () => {
    for (const hash of ["", "#", "#/", "#/nothing/here", "#chat2"]) expect(parseRoute(hash).view).toBe("chat");
  });

  it("does not fail on a broken escape", () => {
    expect(parseRoute("#/chat/%E0%A4%A")).toEqual({ view: "chat", detail: "%E0%A4%A" });
  });
});
