import { execFileSync } from "node:child_process";
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

export default defineConfig({
  plugins: [react(), recordSources],
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
