import { savedStore } from "../lib/saved";
import { isObject, readSettings } from "./settings";
import { DEFAULT_SETTINGS, type Settings } from "./types";

/** A named choice of settings. It leaves the model as it is. */
export interface Preset {
  name: string;
  settings: Omit<Settings, "model" | "toolUrls" | "toolServers" | "runsScripts" | "asText" | "showTokens">;
}

/** The presets that the person saved. */
export const ownPresets = savedStore<readonly Preset[]>("presets", [], isPresets);

export const BUILT_IN: readonly Preset[] = [
  { name: "Default", settings: pickPreset(DEFAULT_SETTINGS) },
  { name: "Deterministic", settings: pickPreset({ ...DEFAULT_SETTINGS, temperature: 0 }) },
  { name: "Balanced", settings: pickPreset({ ...DEFAULT_SETTINGS, temperature: 0.7, topP: 0.9 }) },
  { name: "Creative", settings: pickPreset({ ...DEFAULT_SETTINGS, temperature: 1.2, minP: 0.05 }) },
];

export function savePreset(name: string, settings: Settings): void {
  const others = ownPresets.get().filter((preset) => preset.name !== name);
  const all = [...others, { name, settings: pickPreset(settings) }];
  ownPresets.set(all.sort((a, b) => a.name.localeCompare(b.name)));
}

export function deletePreset(name: string): void {
  ownPresets.set(ownPresets.get().filter((preset) => preset.name !== name));
}

/** The preset that the settings are now, if they are one. */
export function findPreset(settings: Settings, presets: readonly Preset[]): Preset | undefined {
  const now = JSON.stringify(pickPreset(settings));
  return presets.find((preset) => JSON.stringify(pickPreset(readSettings(preset.settings))) === now);
}

function pickPreset(settings: Settings): Preset["settings"] {
  const {
    model: _model,
    toolUrls: _urls,
    toolServers: _servers,
    runsScripts: _runs,
    asText: _text,
    showTokens: _tokens,
    ...rest
  } = readSettings(settings);
  return rest;
}

function isPresets(value: unknown): value is readonly Preset[] {
  return (
    Array.isArray(value) &&
    value.every((one) => isObject(one) && typeof one.name === "string" && isObject(one.settings))
  );
}
