import { isDemo } from "../api/models";

/** The demo model knows Python's library and little else. */
const FOR_DEMO = ["What does os.path.join do?", "How do I read a file line by line?", "What does itertools.chain do?"];
const FOR_OTHERS = [
  "Explain recursion with a short example.",
  "Write a Python function that merges two sorted lists.",
  "Compare TCP and UDP in a table.",
];

/** Questions to begin with that a model can answer. */
export function listQuestions(model: string): readonly string[] {
  return isDemo(model) ? FOR_DEMO : FOR_OTHERS;
}
