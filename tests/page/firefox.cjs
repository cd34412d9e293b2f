// Loaded into Playwright's driver before Firefox is driven. Firefox ESR 153 knows no `emulation.setMediaFeaturesOverride`,
// which Playwright sends for every tab, so the scheme of colours is set as a preference of the browser instead.
"use strict";
const Module = require("node:module");

const SENDS = /(this\.[\w.]+)\.send\("emulation\.setMediaFeaturesOverride", /g;
const PREFERENCE = "layout.css.prefers-color-scheme.content-override";
const compile = Module.prototype._compile;

Module.prototype._compile = function (text, ...rest) {
  return compile.call(this, text.replace(SENDS, "globalThis.setColourScheme($1, "), ...rest);
};

globalThis.setColourScheme = async (session, { features }) => {
  const value = { dark: 0, light: 1 }[features["prefers-color-scheme"]] ?? 2;
  const { contexts } = await session.send("browsingContext.getTree", { "moz:scope": "chrome" });
  const expression = `Services.prefs.setIntPref(${JSON.stringify(PREFERENCE)}, ${value})`;
  await session.send("script.evaluate", { expression, target: { context: contexts[0].context }, awaitPromise: false });
};
