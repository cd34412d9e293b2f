import { savedStore } from "./saved";

export type Theme = "system" | "light" | "dark";

/** The theme the person chose; "system" follows the operating system. */
export const theme = savedStore<Theme>(
  "theme",
  "system",
  (value): value is Theme => value === "system" || value === "light" || value === "dark",
);

const dark = window.matchMedia("(prefers-color-scheme: dark)");

/** Put the chosen theme on the document, now and whenever the choice or the system's preference changes. */
export function followTheme(): void {
  const apply = () => {
    const chosen = theme.get();
    document.documentElement.dataset.theme = chosen === "system" ? (dark.matches ? "dark" : "light") : chosen;
  };
  apply();
  theme.subscribe(apply);
  dark.addEventListener("change", apply);
}
