import { execFileSync } from "node:child_process";
import { readdirSync, readFileSync } from "node:fs";
import { join, resolve } from "node:path";
import react from "@vitejs/plugin-react";
import { defineConfig, type Plugin } from "vite";

/** The server that `npm run dev` passes API requests on to. */
const SERVER = process.env.MLXR_SERVER ?? "http://127.0.0.1:8080";

/** Records which sources the page was built of; a test in Python tells by that when the page is older than they are. */
const recordSources: Plugin = {
  name: "record-sources",
  apply: "build",
  closeBundle: () => void execFileSync("python3", ["../tools/page_sources.py"], { stdio: "inherit" }),
};

/** Writes the licences of all packages whose code or files are in the page, which their terms ask for. */
const writeLicences: Plugin = {
  name: "write-licences",
  apply: "build",
  generateBundle(_, bundle) {
    const paths = Object.values(bundle).flatMap((part) =>
      part.type === "chunk" ? part.moduleIds : part.originalFileNames.map((name) => resolve(name)),
    );
    const folders = new Set(
      paths.flatMap((path) => /^\0?(.*\/node_modules\/(?:@[^/]+\/)?[^/]+)\//.exec(path)?.[1] ?? []),
    );
    const entries = [...folders].map(readLicence);
    const names = new Map<string, string[]>();
    for (const { name, text } of entries) names.set(text, [...(names.get(text) ?? []), name].sort());
    const parts = [...names].map(([text, of]) => `${of.join(", ")}\n\n${text}\n`).sort();
    const source = ["The page contains these packages. Each is followed by its licence.\n", ...parts].join(
      `\n${"-".repeat(80)}\n`,
    );
    this.emitFile({ type: "asset", fileName: "licenses.txt", source });
  },
};

/** The name of the package in a folder, with its version and the name of its licence, and the licence's text. */
function readLicence(folder: string): { name: string; text: string } {
  const { name, version, license, author, homepage, main } = JSON.parse(
    readFileSync(join(folder, "package.json"), "utf8"),
  );
  const file = readdirSync(folder).find((one) => /^(licen[cs]e|copying)/i.test(one));
  const by = typeof author === "string" ? author : (author?.name ?? "its authors");
  const text = file
    ? readFileSync(join(folder, file), "utf8").replaceAll("\r", "").trim()
    : `${license} licence. The package has no file with its text. By ${by}. ${homepage ?? ""}`.trim();
  // What was built into one file before names the licences of its parts in comments.
  const inside = main?.endsWith(".js") ? readFileSync(join(folder, main), "utf8").match(/@license [^\n*]{9,}/g) : null;
  const of = (inside ?? []).map((line) => line.replace("@license", "It contains").trim());
  return { name: `${name} ${version} (${license})`, text: [text, ...new Set(of)].join("\n\n") };
}

export default defineConfig({
  plugins: [react(), writeLicences, recordSources],
  base: "./",
  build: {
    outDir: "../src/mlxr/server/page",
    emptyOutDir: true,
    target: "es2022",
    // Without it Vite writes small files into the CSS and HTML as data: addresses.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    // One file of styles: a view whose own did not come the first time would be drawn without, as Vite asks once.
    cssCodeSplit: false,
    chunkSizeWarningLimit: 900,
  },
  server: {
    proxy: {
      "/v1": SERVER,
      "/api": SERVER,
      "/health": SERVER,
      "/props": SERVER,
      "/tokenize": SERVER,
      "/sandbox": SERVER,
    },
  },
});
