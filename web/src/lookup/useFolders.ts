import { useEffect, useRef, useState } from "react";
import { describeError } from "../api/client";
import { useStore } from "../lib/store";
import { attachFolder, attaching, findPassages, foldersOf, notices, say } from "./folders";
import type { Found } from "./gather";
import type { Passage } from "./passages";

export type Folders = ReturnType<typeof useFolders>;

/** The folders of a conversation, and the lookup of a question in them. */
export function useFolders(conversation: string) {
  const folders = useStore(foldersOf(conversation));
  const under = useStore(attaching).get(conversation) ?? null;
  const said = useStore(notices).get(conversation) ?? [];
  const [problem, setProblem] = useState<string | null>(null);
  const [isLooking, setIsLooking] = useState(false);
  const controller = useRef<AbortController | null>(null);
  useEffect(() => () => controller.current?.abort(), []);
  /** The passages for a question; null where it was stopped or went wrong, which `problem` tells. */
  const find = async (
    question: string,
    model: string,
    used: number,
  ): Promise<{ passages: Passage[] | undefined } | null> => {
    controller.current?.abort(); // one question at a time
    const own = new AbortController();
    controller.current = own;
    setProblem(null);
    setIsLooking(true);
    try {
      const passages = await findPassages(conversation, question, model, used, own.signal);
      if (own.signal.aborted) return null;
      say(conversation, []);
      return { passages };
    } catch (error) {
      if (!own.signal.aborted) setProblem(`Your question was not sent: ${describeError(error)}`);
      return null;
    } finally {
      if (controller.current === own) setIsLooking(false);
    }
  };
  return {
    list: folders ?? [],
    /** Whether there is something to look up in, as far as that is known. */
    isThere: folders === null || folders.length > 0,
    attaching: under,
    said,
    problem,
    isLooking,
    stopLooking: () => controller.current?.abort(),
    find,
    attach: (name: string, list: () => Promise<readonly Found[]>) => {
      setProblem(null);
      void attachFolder(conversation, name, list);
    },
    dismiss: () => say(conversation, []),
  };
}
