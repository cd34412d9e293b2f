import { savedStore } from "../lib/saved";
import type { Options } from "./options";

/** How often a model with its settings was compared, and how often its answer was the best. */
export interface Tally {
  name: string;
  best: number;
  compared: number;
}

/** The votes of this browser. */
export const tallies = savedStore<readonly Tally[]>("votes", [], isTallies);

/** Count a vote for one of those that were compared, or for none. Who was compared with itself is counted once. */
export function addVote(names: readonly string[], best: number | null): void {
  const known = new Map(tallies.get().map((tally) => [tally.name, tally]));
  for (const name of new Set(names)) {
    const before = known.get(name) ?? { name, best: 0, compared: 0 };
    const won = best !== null && names[best] === name ? 1 : 0;
    known.set(name, { name, best: before.best + won, compared: before.compared + 1 });
  }
  tallies.set([...known.values()].sort((a, b) => b.best / b.compared - a.best / a.compared || b.compared - a.compared));
}

/** A model with what sets it apart, in words. */
export function nameOptions({ model, temperature }: Options, usual: string): string {
  return `${model || usual || "default model"}, temperature ${temperature ?? "default"}`;
}

function isTallies(value: unknown): value is readonly Tally[] {
  return (
    Array.isArray(value) &&
    value.every((one) => typeof one?.name === "string" && Number.isFinite(one.best) && Number.isFinite(one.compared))
  );
}
