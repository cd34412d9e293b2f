import { ApiError, describeError } from "../api/client";

/** Why a request failed or broke off, in words, with the remedy. */
export function explain(error: unknown): string {
  if (error instanceof TypeError) return "The connection to the server broke.";
  const reason = describeError(error).replace(/[.\s]*$/, ".");
  if (!(error instanceof ApiError)) return reason;
  if (error.status === 401) return "The server wants an API key. Enter it, then try again.";
  if (/context length/.test(reason))
    return `${reason.replace(/^messages: t/, "T")} Shorten the message or start a new chat.`;
  if (error.status === 404) return `${reason} Choose another model above, or pull it in the models' view.`;
  if (error.status === 429 || error.status === 503) return `${reason} Try again in a moment.`;
  return reason;
}
