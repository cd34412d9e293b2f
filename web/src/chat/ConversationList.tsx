import { useVirtualizer } from "@tanstack/react-virtual";
import { Download, Plus, Upload } from "lucide-react";
import { useEffect, useMemo, useRef, useState } from "react";
import { describeError } from "../api/client";
import { go, routeHref } from "../lib/route";
import { useStore } from "../lib/store";
import { Button } from "../ui/Button";
import { Menu, MenuItem } from "../ui/Menu";
import { Notice } from "../ui/Notice";
import { runs } from "./answering";
import styles from "./ConversationList.module.css";
import { ConversationMenu } from "./ConversationMenu";
import { saveFile } from "./files";
import { conversations, importWholes, readWholes } from "./library";
import { searchMessages } from "./storage";
import { exportJson, importJson } from "./transfer";
import type { Conversation } from "./types";

/** All conversations, the last used first, with search, import and export. */
export function ConversationList({ current, onChoose }: { current: string; onChoose: () => void }) {
  const all = useStore(conversations) ?? [];
  const [wanted, setWanted] = useState("");
  const found = useFound(all, wanted.trim());
  const startNew = () => {
    go("chat");
    onChoose();
  };
  return (
    <div className={styles.place}>
      <div className={styles.head}>
        <Button className={styles.new ?? ""} onClick={startNew}>
          <Plus /> New chat
        </Button>
        <TransferMenu all={all} />
      </div>
      <input
        type="search"
        className={styles.search}
        aria-label="Search the conversations"
        placeholder="Search"
        value={wanted}
        onChange={(event) => setWanted(event.target.value)}
      />
      {all.length === 0 && <p className={styles.none}>Conversations appear here.</p>}
      {all.length > 0 && found.length === 0 && <p className={styles.none}>Nothing has “{wanted.trim()}” in it.</p>}
      <Rows rows={found} current={current} onChoose={onChoose} />
    </div>
  );
}

const ROW = 44;

function Rows({ rows, current, onChoose }: { rows: readonly Conversation[]; current: string; onChoose: () => void }) {
  const scroll = useRef<HTMLElement>(null);
  const answering = new Set([...useStore(runs).values()].map((run) => run.conversation));
  const virtual = useVirtualizer({
    count: rows.length,
    getScrollElement: () => scroll.current,
    estimateSize: () => ROW,
    overscan: 8,
    getItemKey: (index) => rows[index]?.id ?? index,
  });
  return (
    <nav ref={scroll} className={styles.rows} aria-label="Conversations">
      <ul style={{ height: virtual.getTotalSize() }}>
        {virtual.getVirtualItems().map((item) => {
          const row = rows[item.index];
          if (!row) return null;
          return (
            <li
              key={item.key}
              style={{ transform: `translateY(${item.start}px)` }}
              data-current={row.id === current}
              data-answering={answering.has(row.id)}
            >
              <a
                href={routeHref("chat", row.id)}
                aria-current={row.id === current ? "page" : undefined}
                title={row.title}
                onClick={onChoose}
              >
                {row.title}
                {answering.has(row.id) && <span className="hidden-text">, the model answers</span>}
              </a>
              <ConversationMenu conversation={row} />
            </li>
          );
        })}
      </ul>
    </nav>
  );
}

/** The conversations with a text in their title, and a moment later also those with it in a message. */
function useFound(all: readonly Conversation[], wanted: string): readonly Conversation[] {
  const [inside, setInside] = useState<{ wanted: string; ids: ReadonlySet<string> }>({ wanted: "", ids: new Set() });
  useEffect(() => {
    if (wanted.length < 2) return;
    const controller = new AbortController();
    const timer = setTimeout(async () => {
      const ids = await searchMessages(wanted, controller.signal).catch(() => new Set<string>());
      if (!controller.signal.aborted) setInside({ wanted, ids });
    }, 150);
    return () => {
      clearTimeout(timer);
      controller.abort();
    };
  }, [wanted]);
  return useMemo(() => {
    if (wanted === "") return all;
    const lower = wanted.toLowerCase();
    const ids = inside.wanted === wanted ? inside.ids : new Set<string>();
    return all.filter((one) => one.title.toLowerCase().includes(lower) || ids.has(one.id));
  }, [all, wanted, inside]);
}

function TransferMenu({ all }: { all: readonly Conversation[] }) {
  const input = useRef<HTMLInputElement>(null);
  const [told, setTold] = useState<{ kind: "good" | "error"; text: string } | null>(null);
  const importFile = async (file: File | undefined) => {
    if (!file) return;
    try {
      const wholes = importJson(await file.text());
      await importWholes(wholes);
      setTold({
        kind: "good",
        text: `Imported ${wholes.length === 1 ? "1 conversation" : `${wholes.length} conversations`}.`,
      });
    } catch (error) {
      setTold({ kind: "error", text: describeError(error) });
    }
  };
  const exportAll = async () => saveFile("conversations.json", exportJson(await readWholes(all)), "application/json");
  return (
    <>
      <input
        ref={input}
        type="file"
        accept=".json,application/json"
        hidden
        aria-label="File of conversations"
        onChange={(event) => {
          void importFile(event.target.files?.[0]);
          event.target.value = "";
        }}
      />
      <Menu label="Import and export" small={false}>
        <MenuItem onSelect={() => input.current?.click()}>
          <Upload /> Import a file
        </MenuItem>
        <MenuItem onSelect={() => void exportAll()} disabled={all.length === 0}>
          <Download /> Export all
        </MenuItem>
      </Menu>
      {told && (
        <div className={styles.told}>
          <Notice
            kind={told.kind}
            actions={
              <Button small kind="quiet" onClick={() => setTold(null)}>
                Close
              </Button>
            }
          >
            {told.text}
          </Notice>
        </div>
      )}
    </>
  );
}
