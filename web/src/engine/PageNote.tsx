import { useQuery } from "@tanstack/react-query";
import { useEffect, useState } from "react";
import { getJson } from "../api/client";
import type { GroupState, PageDetails } from "../api/live";
import { formatCount } from "../lib/format";
import type { GroupPages } from "./liveState";
import styles from "./PageMap.module.css";
import { describePage } from "./pageColours";

const REST_MS = 120;

/** All about the chosen page; asks the server once the pointer rests. */
export function PageNote({ model, group, page }: { model: string; group: GroupPages; page: number | null }) {
  const rested = useRested(page);
  const asked = useQuery({
    queryKey: ["page", model, group.state.group, rested],
    queryFn: ({ signal }) =>
      getJson<PageDetails>(`/v1/admin/pages/${rested}?model=${encodeURIComponent(model)}&group=${group.state.group}`, {
        signal,
      }),
    enabled: rested !== null,
    staleTime: 500,
    retry: false,
  });
  if (page === null)
    return (
      <p className={styles.note}>
        Point at a page, or move with the arrow keys, to see who holds it. Evicted pages flash red, copies on write
        amber.
      </p>
    );
  const details = rested === page ? asked.data : undefined;
  return (
    <p className={styles.note} role="status">
      <strong>
        {group.state.holds === "states" ? "Slot" : "Page"} {formatCount(page)}
      </strong>{" "}
      is {describePage(group.codes[page] ?? 0)}.{details && ` ${describe(details, group.state)}`}
    </p>
  );
}

function describe(details: PageDetails, { page_size: pageSize, holds }: GroupState): string {
  const parts: string[] = [];
  if (details.sequences.length > 0) {
    const shown = details.sequences.slice(0, 4).map((one) => `${one.request}.${one.index}`);
    const more = details.sequences.length > 4 ? ` and ${details.sequences.length - 4} more` : "";
    parts.push(`Held by answer ${shown.join(", ")}${more}.`);
  }
  if (details.place !== null && holds === "states")
    parts.push(`It is the state after ${formatCount((details.place + 1) * pageSize)} tokens of its text.`);
  else if (details.place !== null)
    parts.push(
      `It has tokens ${formatCount(details.place * pageSize)} to ${formatCount((details.place + 1) * pageSize - 1)} of its text.`,
    );
  if (details.reuses !== null)
    parts.push(`Found again ${details.reuses === 1 ? "once" : `${formatCount(details.reuses)} times`}.`);
  if (details.age_pages !== null) parts.push(`${formatCount(details.age_pages)} pages were used since.`);
  return parts.join(" ");
}

function useRested(page: number | null): number | null {
  const [rested, setRested] = useState(page);
  useEffect(() => {
    const timer = window.setTimeout(() => setRested(page), REST_MS);
    return () => window.clearTimeout(timer);
  }, [page]);
  return rested;
}
